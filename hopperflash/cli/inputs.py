"""Q, K and V of a demonstration: drawn at random, or from a safetensors file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hopperflash.cli.options import ProblemOptions, Sizes
from hopperflash.errors import InvalidArgument
from hopperflash.profiler.passes import Attention

NAMES = ("q", "k", "v")
_BOOLEANS = {"true": True, "false": False}


@dataclass(frozen=True)
class Inputs:
    """Operands on the CPU, and the mask."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool

    @property
    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def to(self, device: torch.device) -> Inputs:
        """The same on another device."""
        q, k, v = (operand.to(device) for operand in self.operands)
        return Inputs(q, k, v, self.causal)


def random_inputs(sizes: Sizes, seed: int) -> Inputs:
    """Standard normal values; the same seed draws the same."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, sizes.dtype.value)
    q, k, v = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in (sizes.q_shape, sizes.k_shape, sizes.k_shape)
    )
    return Inputs(q, k, v, sizes.causal)


def random_attention(options: ProblemOptions, seed: int) -> Attention:
    """The problem that options describe, on the CPU, with standard normal operands."""
    sizes, seqlens, asked = Sizes.of(options), options.packed_lengths, options.attention
    names = ("causal", "window_size", "softcap", "sm_margin")
    keywords = {name: getattr(asked, name) for name in names}
    if seqlens is None:
        return Attention(*random_inputs(sizes, seed).operands, keywords)
    sizes = replace(sizes, batch=1, seqlen_q=sum(seqlens), seqlen_k=sum(seqlens))
    q, k, v = (operand[0] for operand in random_inputs(sizes, seed).operands)
    return Attention(q, k, v, keywords, offsets(seqlens), max(seqlens))


def offsets(seqlens: Sequence[int]) -> Tensor:
    """(sequences + 1,) int32: where each sequence begins, and where the last ends."""
    return torch.tensor([0, *accumulate(seqlens)], dtype=torch.int32)


def read_inputs(path: Path, causal: bool | None) -> Inputs:
    """Tensors q, k and v of a file; its metadata may hold causal, which `causal` overrides.

    Raises `InvalidArgument` for a file that cannot be read or lacks a tensor.
    """
    try:
        with safe_open(path, framework="pt") as file:
            found = sorted(file.keys())
            missing = [name for name in NAMES if name not in found]
            tensors = {} if missing else {name: file.get_tensor(name) for name in NAMES}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise InvalidArgument(f"cannot read {path}:", [str(error)]) from None
    if missing:
        raise InvalidArgument(
            f"{path} lacks tensors {', '.join(missing)}:", [f"found {', '.join(found) or 'none'}"]
        )
    if causal is None:
        causal = _causal_of(path, metadata.get("causal", "true"))
    return Inputs(**tensors, causal=causal)


def _causal_of(path: Path, text: str) -> bool:
    value = _BOOLEANS.get(text.lower())
    if value is None:
        raise InvalidArgument(f"{path}: metadata causal is {text!r}: give true or false")
    return value
