"""Commands whose options are the fields of a dataclass, and the options that commands share."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from hopperflash.cli.output import exit_on_refusal
from hopperflash.errors import InvalidArgument
from hopperflash.problem import AttnOptions, DType

Options = TypeVar("Options")


class DTypeName(str, Enum):
    """How the command line spells a `DType`."""

    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def dtype(self) -> DType:
        return {DTypeName.BF16: DType.BFLOAT16, DTypeName.FP16: DType.FLOAT16}[self]


def flag(help_text: str, *names: str, **settings: Any) -> Any:
    """A typer option; its default is that of the dataclass field."""
    return typer.Option(*names, help=help_text, **settings)


def size(help_text: str, default: int | str) -> Any:
    """An optional size >= 1; None in the dataclass, shown as `default`."""
    return typer.Option(help=help_text, min=1, show_default=str(default))


# What torch.Generator takes as a signed seed, less the one that the gradients add.
SEED_MAX = 2**63 - 2
SmMargin = Annotated[int, flag("SMs that are left to other kernels.", min=0)]
Seed = Annotated[int, flag("Of the random inputs and the random schedule.", min=0, max=SEED_MAX)]


@dataclass(frozen=True)
class SizeOptions:
    """Sizes of a dense problem; None where the user gave none."""

    batch: Annotated[int | None, size("Batch entries.", 1)] = None
    seqlen: Annotated[int | None, size("Queries.", 512)] = None
    seqlen_k: Annotated[int | None, size("Keys.", "seqlen")] = None
    heads: Annotated[int | None, size("Query heads.", 2)] = None
    kv_heads: Annotated[int | None, size("Key heads; divides heads.", "heads / 2, or heads")] = None
    head_dim: Annotated[int | None, size("Head dim, a multiple of 8 to 256.", 128)] = None
    dtype: Annotated[DTypeName | None, flag("Element type.", show_default="bf16")] = None
    causal: Annotated[bool | None, flag("Mask.", "--causal/--full", show_default="causal")] = None


@dataclass(frozen=True)
class ProblemOptions(SizeOptions):
    """A problem of any kind; without `seqlens` it is dense."""

    seqlens: Annotated[str | None, flag("Packed sequences of these lengths: 5,130,0.")] = None
    window: Annotated[str | None, flag("LEFT,RIGHT keys a query sees; -1 is unbounded.")] = None
    softcap: Annotated[float, flag("Caps scores at this; 0 for none.")] = 0.0
    sm_margin: SmMargin = 0

    @property
    def packed_lengths(self) -> tuple[int, ...] | None:
        """Lengths of packed sequences; `InvalidArgument` beside sizes of a dense problem."""
        if self.seqlens is None:
            return None
        dense = [
            f"--{name.replace('_', '-')}"
            for name in ("batch", "seqlen", "seqlen_k")
            if getattr(self, name) is not None
        ]
        lengths = integers("--seqlens", self.seqlens, "5,130,0")
        reasons = [f"--seqlens gives every length: leave {', '.join(dense)} away"] if dense else []
        reasons += [f"--seqlens holds {length}: give lengths" for length in lengths if length < 0]
        if reasons:
            raise InvalidArgument("these options do not go together:", reasons)
        return lengths

    @property
    def attention(self) -> AttnOptions:
        """The mask, the cap and the SMs to leave; a window alone is not causal."""
        causal = self.causal is True if self.window is not None else self.causal is not False
        window: tuple[int, ...] = (-1, -1)
        if self.window is not None:
            window = integers("--window", self.window, "512,0")
            if len(window) != 2:
                raise InvalidArgument(f"--window is {self.window!r}: give LEFT,RIGHT such as 512,0")
        return AttnOptions(
            causal=causal, window_size=window, softcap=self.softcap, sm_margin=self.sm_margin
        )


def integers(name: str, text: str, example: str) -> tuple[int, ...]:
    """Numbers between commas; `InvalidArgument` for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(f"{name} is {text!r}: give numbers such as {example}") from None


@dataclass(frozen=True)
class Sizes:
    """`SizeOptions` with every default filled in."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    dtype: DType
    causal: bool

    @classmethod
    def of(cls, given: SizeOptions) -> Sizes:
        heads = given.heads or 2
        seqlen = given.seqlen or 512
        return cls(
            batch=given.batch or 1,
            seqlen_q=seqlen,
            seqlen_k=given.seqlen_k or seqlen,
            heads_q=heads,
            heads_k=given.kv_heads or (heads if heads % 2 else heads // 2),
            head_dim=given.head_dim or 128,
            dtype=(given.dtype or DTypeName.BF16).dtype,
            causal=given.causal is not False,
        )

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen_q, self.heads_q, self.head_dim)

    @property
    def k_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.seqlen_k, self.heads_k, self.head_dim)


def command(options: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Turns `run(options)` into a function that typer reads the fields of `options` from.

    Refusals of the package end it with their message and exit status 2.
    """
    hints = get_type_hints(options, include_extras=True)
    fields = dataclasses.fields(options)  # type: ignore[arg-type]

    def decorate(run: Callable[[Options], None]) -> Callable[..., None]:
        def entry(**values: Any) -> None:
            with exit_on_refusal():
                run(options(**values))

        entry.__name__, entry.__doc__ = run.__name__, _paragraphs(run.__doc__ or "")
        entry.__annotations__ = {field.name: hints[field.name] for field in fields}
        entry.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=hints[field.name],
                )
                for field in fields
            ]
        )
        return entry

    return decorate


def _paragraphs(text: str) -> str:
    """`text` with one line per paragraph: typer keeps line ends, terminals have other widths."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))
