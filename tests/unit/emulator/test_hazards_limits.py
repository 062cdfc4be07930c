"""Limits at which hardware refuses or misbehaves: setmaxnreg, launches, barriers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from hopperflash.emulator.errors import BarrierError, EmulationError
from hopperflash.emulator.limits import check_launch
from hopperflash.emulator.machine import Launch
from hopperflash.emulator.ptx_ir import Kernel, Param
from hopperflash.emulator.ptx_parser import parse_module
from hopperflash.emulator.register_rules import registers_at_entry
from tests.support.hazards import RUNS, hazards_of
from tests.support.ptx import execute


def _kernel(body: str, directives: str) -> Kernel:
    text = f"""
    .version 8.8
    .target sm_90a
    .address_size 64
    .visible .entry kernel(.param .u64 p0) {directives}
    {{
        .reg .pred %p<9>; .reg .b32 %r<9>;
        mov.u32 %r0, %tid.x; setp.lt.u32 %p1, %r0, 128; setp.lt.u32 %p2, %r0, 32;
        {body}
        ret;
    }}
    """
    return parse_module(text).kernels["kernel"]


ROLES = """
    @%p1 bra PRODUCER;
    {consumer}
    bra DONE;
PRODUCER:
    {producer}
DONE:
"""
THREE_GROUPS = ".reqntid 384, 1, 1 .minnctapersm 1"
DEC = "setmaxnreg.dec.sync.aligned.u32 {};"
INC = "setmaxnreg.inc.sync.aligned.u32 {};"


def _roles(producer: str, consumer: str) -> Kernel:
    return _kernel(ROLES.format(producer=producer, consumer=consumer), THREE_GROUPS)


def _found(kernel: Kernel, schedule: str, seed: int) -> list[str]:
    out = np.zeros(1, np.uint32)
    return execute(kernel, out, threads=384, schedule=schedule, seed=seed).hazards


# 384 threads start with 168 registers each: 504 in all, for 24 + 2 x 240.
@pytest.mark.parametrize(
    ("producer", "consumer", "report"),
    [
        (DEC.format(24), INC.format(240), ""),
        (DEC.format(40), INC.format(240), "520 registers a thread in all, 168 x 3 were granted"),
        ("", INC.format(240), "648 registers a thread in all"),
        (DEC.format(24), INC.format(236), "236 is no multiple of 8 in 24..256"),
        (DEC.format(16), INC.format(240), "16 is no multiple of 8 in 24..256"),
        (DEC.format(24), INC.format(240) + INC.format(160), ".inc raises 240 registers to 160"),
        (DEC.format(176), INC.format(168), ".dec lowers 168 registers to 176"),
        (f"@%p2 bra DONE; {DEC.format(24)}", INC.format(240),
         "not executed by all warps of the warpgroup, but by warps [1, 2, 3]"),
    ],
    ids=["clean", "sum", "no-dec", "not-8", "too-few", "inc-lowers", "dec-raises", "three-warps"],
)  # fmt: skip
def test_setmaxnreg(producer: str, consumer: str, report: str) -> None:
    for schedule, seed in RUNS:
        found = _found(_roles(producer, consumer), schedule, seed)
        assert any(report in hazard for hazard in found) if report else found == []
        assert all("setmaxnreg rule broken" in hazard for hazard in found)


def test_registers_at_entry() -> None:
    assert registers_at_entry(_kernel("", ".reqntid 384, 1, 1"), 384) == 168
    assert registers_at_entry(_kernel("", ".reqntid 256, 1, 1 .minnctapersm 2"), 256) == 128
    assert registers_at_entry(_kernel("", ".reqntid 128, 1, 1"), 128) == 256
    assert registers_at_entry(_kernel("", ".maxnreg 96"), 384) == 96
    # No more than the kernel asks for: 232 of 256 that would fit.
    two_groups = _kernel(DEC.format(40) + INC.format(232), ".reqntid 256, 1, 1")
    assert registers_at_entry(two_groups, 256) == 232
    assert registers_at_entry(_kernel("", ""), 384) is None


LAUNCH = Launch(Kernel("kernel"), (1, 1, 1), (32, 1, 1), (1, 1, 1), 0, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block": (1025, 1, 1)}, "more than 1024 threads"),
        ({"block": (1, 1, 65)}, "64 along z"),
        ({"grid": (1, 65536, 1)}, "grid"),
        ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "no multiple of"),
        ({"grid": (32, 1, 1), "cluster": (32, 1, 1)}, "more than 16 CTAs"),
        ({"shared_bytes": 232449}, "232449 bytes of shared memory"),
        ({"kernel": Kernel("kernel", [Param("p", 32768, 8, 0)])}, "bytes of parameters"),
        ({"kernel": Kernel("kernel", reqntid=(64, 1, 1))}, ".reqntid (64, 1, 1)"),
        ({"kernel": Kernel("kernel", cluster=(2, 1, 1))}, ".reqnctapercluster (2, 1, 1)"),
        ({"kernel": Kernel("kernel", maxnreg=255), "block": (512, 1, 1)}, "255 registers x 512"),
    ],
)  # fmt: skip
def test_launches_that_a_device_refuses(change: dict[str, object], message: str) -> None:
    check_launch(LAUNCH, 0)
    with pytest.raises(EmulationError, match="cannot be launched") as error:
        check_launch(dataclasses.replace(LAUNCH, **change), 0)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_named_barriers() -> None:
    with pytest.raises(BarrierError, match="barrier 16"):
        hazards_of("bar.sync 16;", "eager", 0)
    with pytest.raises(BarrierError, match="with 48 threads"):
        hazards_of("bar.sync 1, 48;", "eager", 0, threads=64)
    with pytest.raises(BarrierError, match="96 threads arrived for 64"):
        body = "setp.lt.u32 %p1, %r0, 64; @%p1 bra TWO; bar.arrive 1, 96; TWO: bar.sync 1, 64;"
        hazards_of(body.replace("1, 96", "1, 64"), "eager", 0, threads=160)
