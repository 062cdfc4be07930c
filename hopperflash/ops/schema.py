"""The operators' names and arguments, defined with torch when this module is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hopperflash.calls import INPUTS
from hopperflash.errors import InvalidArgument
from hopperflash.problem import GRADIENTS, AttnOptions, AttnProblem, Direction
from hopperflash.problem.lengths import LENGTHS

NAMESPACE = "hopperflash"
UNBOUNDED = -1
RESULTS: dict[Direction, tuple[str, ...]] = {"forward": ("out", "lse"), "backward": GRADIENTS}

_MAY_BE_MISSING = ("seqused_q", "seqused_k", "dlse")
_MASK = "bool[3] output_mask=[True, True, True]"
_ALL = (True, True, True)
_OPTIONS = (
    "float? softmax_scale=None, bool causal=False, SymInt window_left=-1, SymInt window_right=-1,"
    " float softcap=0.0, bool deterministic=False, str? backend=None, int sm_margin=0"
)


class Options(NamedTuple):
    """The last arguments of every operator; a window of -1 is unbounded."""

    softmax_scale: float | None = None
    causal: bool = False
    window_left: int = UNBOUNDED
    window_right: int = UNBOUNDED
    softcap: float = 0.0
    deterministic: bool = False
    backend: str | None = None
    sm_margin: int = 0

    @classmethod
    def of(cls, problem: AttnProblem, backend: str | None) -> Options:
        """Those that make this problem."""
        mask = problem.mask
        return cls(
            softmax_scale=problem.softmax_scale,
            window_left=UNBOUNDED if mask.left is None else mask.left,
            window_right=UNBOUNDED if mask.right is None else mask.right,
            softcap=problem.softcap,
            deterministic=problem.deterministic,
            backend=backend,
            sm_margin=problem.sm_margin,
        )

    @property
    def for_problem(self) -> AttnOptions:
        """As `build_problem` takes them; follows `torch.use_deterministic_algorithms`."""
        return AttnOptions(
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window_size=(self.window_left, self.window_right),
            softcap=self.softcap,
            deterministic=self.deterministic or torch.are_deterministic_algorithms_enabled(),
            sm_margin=self.sm_margin,
        )


class Arguments(NamedTuple):
    """What an operator was called with: tensors by name, gradients to compute, options."""

    tensors: dict[str, Tensor]
    gradients: tuple[str, ...]
    options: Options


@dataclass(frozen=True)
class Operator:
    """One of the eight, by what it is called and takes; `operator_of` finds it."""

    name: str
    direction: Direction
    packed: bool
    memory: tuple[str, ...]
    """Results that it writes to given memory; then it is not differentiable."""
    operands: tuple[str, ...]
    """Tensors that are arguments, in order."""
    returns: tuple[str, ...]
    """Results that are new."""

    @classmethod
    def that_runs(cls, direction: Direction, packed: bool, into: bool) -> Operator:
        """The one of these traits; an LSE is new in any case."""
        forward, lengths = direction == "forward", LENGTHS if packed else ()
        written = ("out",) if forward else GRADIENTS
        memory = written if into else ()
        saved = INPUTS if forward else ("dout", *INPUTS, "out", "lse")
        return cls(
            name=f"{'varlen_' * packed}{'fwd' if forward else 'bwd'}{'_into' * into}",
            direction=direction,
            packed=packed,
            memory=memory,
            operands=(*memory, *saved, *lengths, *(() if forward else ("dlse",))),
            returns=tuple(name for name in RESULTS[direction] if name not in memory),
        )

    @property
    def selects(self) -> bool:
        """Whether `output_mask` says which results are wanted; the others are returned empty."""
        return self.direction == "backward" and not self.memory

    @property
    def overload(self) -> Any:
        """What torch dispatches."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def define(self, library: torch.library.Library) -> None:
        """Makes its schema known to torch."""
        arguments = [
            f"{self._type_of(name)} {name}{'=None' * (name in _MAY_BE_MISSING)}"
            for name in self.operands
        ]
        arguments += [*([_MASK] if self.selects else []), _OPTIONS]
        returns = ", ".join(f"Tensor {name}" for name in self.returns)
        library.define(  # type: ignore[no-untyped-call]
            f"{self.name}({', '.join(arguments)}) -> ({returns})",
            tags=(torch.Tag.pt2_compliant_tag,),
        )

    def bind(self, arguments: Sequence[Any]) -> Arguments:
        """Positional arguments as torch passes them: it leaves trailing defaults away."""
        count = len(self.operands)
        tensors = {
            name: tensor
            for name, tensor in zip(self.operands, arguments, strict=False)
            if tensor is not None
        }
        rest = arguments[count:]
        wanted: tuple[str, ...] = GRADIENTS
        if self.selects and rest:
            mask, rest = rest[0], rest[1:]
            if len(mask) != len(GRADIENTS):
                raise InvalidArgument(
                    f"output_mask is {mask}: give three, of {', '.join(GRADIENTS)}"
                )
            wanted = tuple(x for x, is_wanted in zip(GRADIENTS, mask, strict=True) if is_wanted)
        return Arguments(tensors, wanted, Options(*rest))

    def __call__(
        self,
        tensors: Mapping[str, Tensor | None],
        options: Options,
        output_mask: Sequence[bool] = _ALL,
    ) -> Any:
        """Dispatches it."""
        operands = [tensors.get(name) for name in self.operands]
        masks = [output_mask] if self.selects else []
        return self.overload(*operands, *masks, *options)

    def _type_of(self, name: str) -> str:
        if name in self.memory:
            return f"Tensor({'abc'[self.memory.index(name)]}!)"
        return "Tensor?" if name in _MAY_BE_MISSING else "Tensor"


_BY_TRAITS = {
    traits: Operator.that_runs(*traits) for traits in product(RESULTS, (False, True), (False, True))
}
OPERATORS = tuple(_BY_TRAITS.values())
LIBRARY = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]
for _operator in OPERATORS:
    _operator.define(LIBRARY)


def operator_of(direction: Direction, *, packed: bool, into: bool = False) -> Operator:
    """The one that does this."""
    return _BY_TRAITS[direction, packed, into]
