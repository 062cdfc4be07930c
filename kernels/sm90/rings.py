"""Where a consumer is in a ring: `cutlass.pipeline`'s state, and a cheaper one for two stages."""

from __future__ import annotations

from typing import Any

from cutlass import Int32, pipeline
from cutlass.pipeline import PipelineState, PipelineUserType


class TwoStageState(PipelineState):
    """A place in a ring of two stages: an exclusive or leads to the other stage, and another to the
    phase it has there. Stages passed are not counted, which no pipeline asks for."""

    def clone(self, *, loc: Any = None, ip: Any = None) -> TwoStageState:
        return TwoStageState(2, self.count, self.index, self.phase)

    def advance(self, *, loc: Any = None, ip: Any = None) -> None:
        self._phase, self._index = self._phase ^ self._index, self._index ^ 1

    def __new_from_mlir_values__(self, values: list[Any]) -> TwoStageState:
        return TwoStageState(2, *(Int32(value) for value in values))


def consumer_state(stages: int) -> PipelineState:
    """A consumer before the first stage."""
    if stages == 2:
        return TwoStageState(2, Int32(0), Int32(0), Int32(0))
    return pipeline.make_pipeline_state(PipelineUserType.Consumer, stages)
