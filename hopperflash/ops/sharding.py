"""How DTensor may split the operators: over heads, and dense ones over the batch."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor

from hopperflash.ops.schema import OPERATORS, Operator
from hopperflash.problem.lengths import LENGTHS

_STATISTICS = ("lse", "dlse")


def register_if_distributed(*tensors: object) -> None:
    """`register` where DTensor can meet the operators: torch.distributed.tensor takes seconds to
    import, so that it is not imported for them."""
    if "torch.distributed.tensor" in sys.modules and any(type(x) is not Tensor for x in tensors):
        register()


@lru_cache(maxsize=1)
def register() -> None:
    """Gives every operator that makes new tensors its rule; the public functions do so."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator = DTensor._op_dispatcher.sharding_propagator
    for operator in OPERATORS:
        if operator.memory:
            continue
        register_sharding(operator.overload)(_rule(operator))
        # What comes after the tensors says which results are empty, so decisions depend on it.
        count = len(operator.operands)
        propagator.op_to_schema_info[operator.overload] = RuntimeSchemaInfo(
            count, needs_pytree=True
        )


def _rule(operator: Operator) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """(placements of the results, placements of the operands) that compute the same."""

    def acceptable(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        from torch.distributed.tensor import Replicate, Shard

        specs = operator.bind(arguments).tensors
        ways: list[Callable[[str], Any]] = [lambda name: Replicate()]
        if not operator.packed:
            ways.append(lambda name: Shard(0))
        if _heads_split_evenly(specs["k"], batched=not operator.packed):
            ways.append(lambda name: Shard(_head_dim(name, batched=not operator.packed)))
        return [
            (
                [way(name) for name in operator.returns],
                [Replicate() if name in LENGTHS else way(name) for name in specs],
            )
            for way in ways
        ]

    return acceptable


def _head_dim(name: str, *, batched: bool) -> int:
    """Which dimension of an operand or result counts heads."""
    return (0 if name in _STATISTICS else 1) + batched


def _heads_split_evenly(k: Any, *, batched: bool) -> bool:
    """Whether every part has whole groups of query heads, each with the key head they share."""
    shards = math.prod(
        k.mesh.size(i)
        for i, placement in enumerate(k.placements)
        if not (batched and placement.is_shard(0))
    )
    return bool(k.shape[2 if batched else 1] % shards == 0)
