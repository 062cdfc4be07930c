"""An emulation run as text: launches, counters by kernel, hazards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = tuple[str, ...]

# Counters by subject; those that start with a prefix follow in the order of their names.
_SUBJECTS: dict[str, tuple[str, ...]] = {
    "work": ("launches", "ctas", "warp_instructions"),
    "tensor cores": ("wgmma", "wgmma_flops", "mma", "mma_flops"),
    "global memory": (
        "tma_loads", "tma_load_bytes", "tma_stores", "tma_store_bytes", "tma_reduce_bytes",
        "global_load_bytes", "global_store_bytes", "global_atomic_bytes",
        "unique_global_load_bytes", "global_reread_bytes", "unique_global_store_bytes",
    ),
    "shared memory": ("shared_load_bytes", "shared_store_bytes", "shared_bank_conflicts"),
    "waits": ("mbarrier_waits", "barrier_waits", "cluster_waits"),
    "special functions": ("mufu",),
}  # fmt: skip
_PREFIXES = {
    "instructions by shape": ("wgmma:", "mma:"),
    "FLOPs by shape": ("flops:",),
    "warp instructions by class": ("class:",),
    "warp instructions by opcode": ("op:",),
}
_NAME_WIDTH = 60


def render(run: Any) -> str:
    """`EmulationRun.report()`."""
    columns = {_shorten(name): counters for name, counters in run.kernels.items()}
    if len(columns) != 1:
        columns["all"] = run.counters
    sections = [table(list(_launches(run.launches))), *_counters(columns)]
    if run.hazards:
        sections.append("\n".join(["hazards:", *(f"  {text}" for text in run.hazards)]))
    else:
        sections.append("no hazards")
    return "\n\n".join(section for section in sections if section)


def _launches(launches: Sequence[Any]) -> Iterator[Row]:
    yield "grid", "block", "cluster", "CTAs run", "smem", "setmaxnreg", "kernel"
    for info in launches:
        yield (
            _dims(info.grid), _dims(info.block), _dims(info.cluster), str(info.ctas_run),
            str(info.shared_bytes), " ".join(map(str, info.registers_set)) or "-",
            _shorten(info.kernel_name),
        )  # fmt: skip


def _counters(columns: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """One table for each subject with anything in it."""
    names = {name for counters in columns.values() for name, value in counters.items() if value}
    subjects = {subject: [n for n in listed if n in names] for subject, listed in _SUBJECTS.items()}
    for subject, prefixes in _PREFIXES.items():
        subjects[subject] = sorted(n for n in names if n.startswith(prefixes))
    listed = {name for members in subjects.values() for name in members}
    subjects["other"] = sorted(names - listed)
    for subject, members in subjects.items():
        if members:
            values = (columns[c] for c in columns)
            header = (subject, *(columns if len(columns) > 1 else ("",)))
            rows = [header, *_rows(members, list(values))]
            yield table(rows)


def _rows(members: Sequence[str], columns: Sequence[Mapping[str, int]]) -> Iterator[Row]:
    for name in members:
        label = name.removeprefix("flops:").removeprefix("class:").removeprefix("op:")
        yield (f"  {label}", *(f"{column.get(name, 0):,}" for column in columns))


def _dims(dim: Sequence[int]) -> str:
    return "x".join(map(str, dim))


def _shorten(name: str) -> str:
    return name if len(name) <= _NAME_WIDTH else name[: _NAME_WIDTH - 3] + "..."


def table(rows: Sequence[Row]) -> str:
    """Columns of text; the first is aligned to the left, numbers to the right."""
    if not rows:
        return ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    numeric = [
        i > 0 and all(cell.strip("-").replace(",", "").isdigit() for cell in column[1:])
        for i, column in enumerate(zip(*rows, strict=True))
    ]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    )
