"""What Nsight Compute is asked to count, by what it means here; docs/profiling.md says why these.

Names are those of ncu 2024.1 for gh100, ga100, ga102 and ad102 (`ncu --query-metrics --chips`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

# Launch and occupancy facts and stalls; their names are in the section files of each release.
SECTIONS = ("LaunchStats", "Occupancy", "WarpStateStats")
LINE_SECTION = "SourceCounters"  # instructions and stalls of each line

_SECTOR = 32
_BUSY = "avg.pct_of_peak_sustained_active"
_CHIPS = {
    "sm_80": "ga100",
    "sm_86": "ga102",
    "sm_87": "ga10b",
    "sm_89": "ad102",
    "sm_90a": "gh100",
    "sm_120a": "gb202",
}
_HOPPER = re.compile("gmma|_tma_")
_BASE_NAME = re.compile(r"^([a-z0-9]+__\w+) +\w", re.MULTILINE)


@dataclass(frozen=True)
class Sum:
    """One way to know a quantity: the sum of metrics, times a factor."""

    metrics: tuple[str, ...]
    factor: int = 1

    def of(self, values: Mapping[str, float]) -> float | None:
        """The quantity; None where one of the metrics is not among the values."""
        if not all(name in values for name in self.metrics):
            return None
        return self.factor * sum(values[name] for name in self.metrics)


@dataclass(frozen=True)
class Quantity:
    """Something worth knowing, and the ways to know it, the best first: releases and chips have
    different metrics."""

    ways: tuple[Sum, ...]

    def of(self, values: Mapping[str, float]) -> float | None:
        """By the first way whose metrics were counted; None where there is none."""
        return next((found for way in self.ways if (found := way.of(values)) is not None), None)

    def asked(self, has: Callable[[str], bool]) -> tuple[str, ...]:
        """The metrics of the first way all of which a chip has; none where there is no way."""
        return next((way.metrics for way in self.ways if all(map(has, way.metrics))), ())


def _one(*names: str) -> Quantity:
    return Quantity(tuple(Sum((name,)) for name in names))


DURATION = _one("gpu__time_duration.sum")  # ns
# Bytes between SMs and L2. TMA's are among them, and are in no metric of the LSU pipe.
LOADED = Quantity(
    (
        Sum(("l1tex__m_xbar2l1tex_read_bytes.sum",)),
        Sum(("lts__t_sectors_srcunit_tex_op_read.sum",), _SECTOR),
    )
)
STORED = Quantity(
    (
        Sum(("l1tex__m_l1tex2xbar_write_bytes.sum",)),
        Sum(
            tuple(f"lts__t_sectors_srcunit_tex_op_{op}.sum" for op in ("write", "red", "atom")),
            _SECTOR,
        ),
    )
)
TMA_LOADED = _one("l1tex__m_xbar2l1tex_read_bytes_mem_global_op_tma_ld.sum")
TMA_STORED = Quantity(
    (
        Sum(
            tuple(
                f"l1tex__m_l1tex2xbar_write_bytes_mem_global_op_tma_{op}.sum"
                for op in ("st", "red")
            )
        ),
    )
)
DRAM_READ = _one("dram__bytes_read.sum", "dram__bytes_op_read.sum")
DRAM_WRITTEN = _one("dram__bytes_write.sum", "dram__bytes_op_write.sum")
INSTRUCTIONS = _one("smsp__inst_executed.sum")
LOCAL = _one("smsp__sass_inst_executed_op_local.sum")  # spills
# Bank conflicts of LDS, STS and of wgmma's operands, in wavefronts.
CONFLICTS = _one("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum")
# Cycles, or instructions where a pipe has no such counter, in % of the unit's peak while SMs work;
# by the names of `plan.units.LABELS`.
BUSY = {
    # wgmma counts here; sm__ops_path_tensor_op_hmma_* is reported to read 0 for it.
    "tensor": _one(
        f"sm__pipe_tensor_cycles_active.{_BUSY}", f"sm__pipe_tensor_op_hmma_cycles_active.{_BUSY}"
    ),
    "mufu": _one(f"sm__inst_executed_pipe_xu.{_BUSY}"),
    "issue": _one(f"smsp__issue_active.{_BUSY}", f"sm__inst_issued.{_BUSY}"),
    "fma": _one(f"sm__pipe_fma_cycles_active.{_BUSY}", f"sm__inst_executed_pipe_fma.{_BUSY}"),
    "alu": _one(f"sm__pipe_alu_cycles_active.{_BUSY}", f"sm__inst_executed_pipe_alu.{_BUSY}"),
    # All banks, whoever reads: the wavefronts of the LSU pipe are not those of TMA.
    "shared": _one(
        f"l1tex__data_bank_reads.{_BUSY}",
        "l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",
    ),
    "l2": _one("lts__t_sectors.avg.pct_of_peak_sustained_elapsed"),
}
# Instructions of the tensor pipes: Hopper's is gmma, and no other chip has it.
WGMMA = _one("sm__inst_executed_pipe_tensor_op_gmma.sum")
MMA_SYNC = _one("sm__inst_executed_pipe_tensor_op_hmma.sum")

QUANTITIES = (
    DURATION, LOADED, STORED, TMA_LOADED, TMA_STORED, DRAM_READ, DRAM_WRITTEN, INSTRUCTIONS, LOCAL,
    CONFLICTS, *BUSY.values(), WGMMA, MMA_SYNC,
)  # fmt: skip
DEVICE = ("device__attribute_multiprocessor_count", "device__attribute_l2_cache_size")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_NO_STALLS = ("selected", "not_selected")


def query(ncu: str, target: str) -> tuple[str, ...] | None:
    """The command that lists the metrics of a target's chip, without a GPU; None for a chip that
    is not known here."""
    chip = _CHIPS.get(target)
    return None if chip is None else (ncu, "--query-metrics", "--chips", chip)


def base_names(listing: str) -> frozenset[str]:
    """Metrics without their suffixes, from what `query` prints."""
    return frozenset(_BASE_NAME.findall(listing))


def asked(
    target: str,
    known: frozenset[str] | None = None,
    quantities: Sequence[Quantity] | None = None,
) -> tuple[str, ...]:
    """Metrics to collect on a target's chip: of each quantity by the best way that it has.

    `known` are the base names that its ncu listed; without a list, what only Hopper has is asked of
    Hopper alone. `quantities` are those wanted; None for all.
    """

    def has(name: str) -> bool:
        if known is None:
            return target == "sm_90a" or not _HOPPER.search(name)
        return name.partition(".")[0] in known

    wanted = QUANTITIES if quantities is None else quantities
    names = [name for quantity in wanted for name in quantity.asked(has)]
    return tuple(dict.fromkeys([*names, *DEVICE]))


def stalls(values: Mapping[str, float], most: int = 3) -> tuple[tuple[str, float], ...]:
    """Why warps wait, by warps per issued instruction, the longest first."""
    found = [(match[1], values[name]) for name in values if (match := STALL.fullmatch(name))]
    waiting: Iterable[tuple[str, float]] = (x for x in found if x[0] not in _NO_STALLS)
    return tuple(sorted(waiting, key=lambda x: -x[1])[:most])
