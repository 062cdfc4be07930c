"""What was counted, in a profile or by the emulator, beside what the plan's models say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from hopperflash.analysis.tiled_traffic import L2, call_traffic
from hopperflash.plan import KernelCall, LaunchPlan
from hopperflash.plan.config import (
    BackwardConfig,
    BackwardConfigSm80,
    ForwardConfig,
    ForwardConfigSm80,
    PostprocessConfig,
    PreprocessConfig,
)
from hopperflash.plan.cost import tile_step
from hopperflash.profiler import metrics
from hopperflash.profiler.ncu import KernelProfile

# How the names of compiled kernels begin, by what they are configured with.
_NAMES: tuple[tuple[tuple[type, ...], str], ...] = (
    ((ForwardConfig, ForwardConfigSm80), "hopperflash_fwd_"),
    ((BackwardConfig, BackwardConfigSm80), "hopperflash_bwd_sm"),
    ((PreprocessConfig,), "hopperflash_bwd_preprocess_"),
    ((PostprocessConfig,), "hopperflash_bwd_postprocess_"),
)
_INSTRUCTIONS = "warp instructions"
_LAUNCH = {
    "registers": "launch__registers_per_thread",
    "bytes of shared memory": "launch__shared_mem_per_block_allocated",
    "CTAs an SM by registers": "launch__occupancy_limit_registers",
    "CTAs an SM by shared memory": "launch__occupancy_limit_shared_mem",
}
_COUNTED = {
    _INSTRUCTIONS: metrics.INSTRUCTIONS,
    "warps' wgmma": metrics.WGMMA,
    "warps' mma.sync": metrics.MMA_SYNC,
    "instructions on local memory": metrics.LOCAL,
    "bank conflicts": metrics.CONFLICTS,
}


@dataclass(frozen=True)
class Bytes:
    """Bytes of a kernel by where they pass; None where nobody counted, or no model says."""

    name: str
    counted: float | None
    model: float | None = None

    @property
    def ratio(self) -> float | None:
        """Counted over modelled."""
        return self.counted / self.model if self.counted is not None and self.model else None


@dataclass(frozen=True)
class Unit:
    """How busy a unit was in % of its peak, and in % of the bounding unit's time in the model."""

    name: str
    busy: float | None
    model: float | None


@dataclass(frozen=True)
class Comparison:
    """One kernel; `nanoseconds` None where it was emulated."""

    name: str
    launches: int
    grid: tuple[int, ...]
    block: tuple[int, ...]
    nanoseconds: float | None
    facts: dict[str, float]
    bytes: tuple[Bytes, ...]
    units: tuple[Unit, ...] = ()
    stalls: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class _Model:
    """A launch that a plan has, on a device with this cache."""

    plan: LaunchPlan
    call: KernelCall
    l2: L2 | None

    def bytes(self) -> dict[str, int]:
        """By the names of `_byte_rows`; empty for packed operands."""
        if self.plan.problem.is_packed:
            return {}
        moved = call_traffic(self.plan, self.call)
        found = {"loaded": moved.asked.loaded, "stored": moved.asked.stored}
        if self.l2 is not None:
            behind = moved.behind(self.l2)
            found |= {"read": behind.loaded, "written": behind.stored}
        return found

    def units(self) -> dict[str, float]:
        """Each unit's share of the time of the one that bounds a step, in %."""
        config = self.call.spec.config
        if not isinstance(config, (ForwardConfig, BackwardConfig)):
            return {}
        units = tile_step(config, self.plan.problem.dtype.itemsize).units
        return {name: 100 * clocks / units.bound.clocks for name, clocks in asdict(units).items()}


def of_profiles(
    profiles: Iterable[KernelProfile], plans: Sequence[LaunchPlan], l2: L2 | None
) -> tuple[Comparison, ...]:
    """Kernels of a report beside the plans of what they ran; `l2` where the report names none."""
    return tuple(_of_profile(profile, _model(profile, plans, l2)) for profile in profiles)


def of_emulated(
    kernels: Mapping[str, Mapping[str, int]],
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
    plans: Sequence[LaunchPlan],
) -> Iterator[Comparison]:
    """The kernels of the plans among those that the emulator executed; `shapes` has their grids and
    blocks. Its bytes are those that kernels ask for: no cache and no DRAM is emulated."""
    for name, counted in kernels.items():
        call = _call(name, plans)
        if call is None:
            continue
        model = _Model(*call, None).bytes()
        stored = ("tma_store_bytes", "global_store_bytes", "global_atomic_bytes")
        yield Comparison(
            name=name,
            launches=counted["launches"],
            grid=shapes[name][0],
            block=shapes[name][1],
            nanoseconds=None,
            facts={_INSTRUCTIONS: counted["warp_instructions"]},
            bytes=(
                Bytes(
                    "loaded by SMs",
                    counted["tma_load_bytes"] + counted["global_load_bytes"],
                    model.get("loaded"),
                ),
                Bytes("of it by TMA", counted["tma_load_bytes"]),
                Bytes("stored by SMs", sum(counted[one] for one in stored), model.get("stored")),
                Bytes("of it by TMA", counted["tma_store_bytes"]),
            ),
        )


def _of_profile(profile: KernelProfile, model: _Model | None) -> Comparison:
    values = profile.metrics
    bytes_, units = (model.bytes(), model.units()) if model is not None else ({}, {})
    facts = {label: values[name] for label, name in _LAUNCH.items() if name in values}
    facts |= {
        label: found
        for label, quantity in _COUNTED.items()
        if (found := quantity.of(values)) is not None
    }
    return Comparison(
        name=profile.name,
        launches=profile.launches,
        grid=profile.grid,
        block=profile.block,
        nanoseconds=metrics.DURATION.of(values),
        facts=facts,
        bytes=(
            Bytes("loaded by SMs", metrics.LOADED.of(values), bytes_.get("loaded")),
            Bytes("of it by TMA", metrics.TMA_LOADED.of(values)),
            Bytes("stored by SMs", metrics.STORED.of(values), bytes_.get("stored")),
            Bytes("of it by TMA", metrics.TMA_STORED.of(values)),
            Bytes("read from DRAM", metrics.DRAM_READ.of(values), bytes_.get("read")),
            Bytes("written to DRAM", metrics.DRAM_WRITTEN.of(values), bytes_.get("written")),
        ),
        units=tuple(
            Unit(name, busy.of(values), units.get(name)) for name, busy in metrics.BUSY.items()
        ),
        stalls=metrics.stalls(values),
    )


def _model(profile: KernelProfile, plans: Sequence[LaunchPlan], l2: L2 | None) -> _Model | None:
    found = _call(profile.name, plans)
    if found is None:
        return None
    sms, size = (profile.metrics.get(name) for name in metrics.DEVICE)
    return _Model(*found, L2(int(size), int(sms)) if size and sms else l2)


def _call(name: str, plans: Sequence[LaunchPlan]) -> tuple[LaunchPlan, KernelCall] | None:
    """The launch of a kernel of that name; None for what is no kernel of the plans."""
    for plan in plans:
        for call in plan.calls:
            for configs, prefix in _NAMES:
                if isinstance(call.spec.config, configs) and name.startswith(prefix):
                    return plan, call
    return None
