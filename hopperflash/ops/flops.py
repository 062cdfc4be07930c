"""FLOP formulas, for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from hopperflash.ops.schema import NAMESPACE, OPERATORS, Operator
from hopperflash.runtime.tensors import has_values


def register() -> None:
    """Gives every operator its formula.

    As torch counts its own attention, so that numbers compare: every pair, seen or hidden by the
    mask, in 2 products of a forward and 5 of a backward. `AttnProblem.useful_flops` counts those
    that are seen.
    """
    for operator in OPERATORS:
        register_flop_formula(_packet(operator), get_raw=True)(_formula(operator))


def _packet(operator: Operator) -> Any:
    return getattr(getattr(torch.ops, NAMESPACE), operator.name)


def _formula(operator: Operator) -> Callable[..., int]:
    def flops(*arguments: Any, **keywords: Any) -> int:
        tensors = operator.bind(arguments).tensors
        q, k, v = tensors["q"], tensors["k"], tensors["v"]
        head_dim, head_dim_v = q.shape[-1], v.shape[-1]
        pairs = _packed_pairs(tensors) if operator.packed else q.shape[0] * q.shape[1] * k.shape[1]
        per_pair = head_dim + head_dim_v
        if operator.direction == "backward":
            per_pair = 3 * head_dim + 2 * head_dim_v
        return 2 * pairs * q.shape[-2] * per_pair

    return flops


def _packed_pairs(tensors: dict[str, Tensor]) -> int:
    """Reads the lengths, which synchronises: whoever counts has asked for it.

    Where only shapes are traced, as if all sequences were of one length.
    """
    offsets = tensors["cu_seqlens_q"]
    if not has_values(offsets):
        return tensors["q"].shape[0] * tensors["k"].shape[0] // max(offsets.shape[0] - 1, 1)
    sizes = [tensors[f"cu_seqlens_{side}"].diff().tolist() for side in "qk"]
    return sum(q * k for q, k in zip(*sizes, strict=True))
