"""Device functions, module variables and printf in hand-written modules."""

from __future__ import annotations

import numpy as np
import pytest

from hopperflash.emulator.errors import EmulationError, UnknownInstruction
from hopperflash.emulator.ptx_parser import parse_module
from tests.support.ptx import execute

HEAD = """
.version 8.8
.target sm_90a
.address_size 64
.global .align 4 .u32 total = 5;
.global .align 4 .f32 weights[4] = {0f3F800000, 0f40000000, 0f40400000, 0f40800000};
.const .align 2 .b16 table[3] = {7, 0x10, 9};
.global .align 1 .b8 form[32] = {37, 117, 32, 37, 46, 50, 102, 32, 37, 108, 100, 32, 37, 115, 37,
    37, 10, 0};
.global .align 1 .b8 word[4] = {97, 98, 99, 0};
.extern .func (.param .b32 status) vprintf (.param .b64 format, .param .b64 arguments);
"""

FUNCTIONS = """
.func (.param .b32 result) triangle(.param .b32 n)
{
    .reg .pred %p<2>; .reg .b32 %r<4>;
    ld.param.b32 %r1, [n]; mov.b32 %r2, 0;
LOOP:
    setp.eq.u32 %p1, %r1, 0; @%p1 bra DONE;
    add.u32 %r2, %r2, %r1; sub.u32 %r1, %r1, 1; bra LOOP;
DONE:
    st.param.b32 [result], %r2;
    ret;
}
.func (.param .align 8 .b8 result[16]) both(.param .align 8 .b8 pair[16])
{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<3>;
    ld.param.b32 %r1, [pair]; ld.param.b64 %rd1, [pair+8];
    { .param .b32 argument; .param .b32 value;
      st.param.b32 [argument], %r1;
      call.uni (value), triangle, (argument);
      ld.param.b32 %r2, [value]; }
    st.param.b32 [result], %r2; setp.lt.u32 %p1, %r1, 3;
    @%p1 st.param.b64 [result+8], 0;
    @%p1 ret;
    st.param.b64 [result+8], %rd1;
    ret;
}
"""


def kernel(body: str, functions: str = FUNCTIONS, pointers: int = 1):
    params = ", ".join(f".param .u64 p{i}" for i in range(pointers))
    loads = "\n".join(f"ld.param.b64 %d{i}, [p{i}];" for i in range(pointers))
    text = f"""{HEAD}{functions}
.visible .entry kernel({params})
{{
    .reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<32>; .reg .b64 %d<32>;
    .local .align 8 .b8 frame[40];
    {loads} mov.u32 %r0, %tid.x; mul.wide.u32 %d30, %r0, 4; mul.wide.u32 %d31, %r0, 8;
    {body}
    ret;
}}
"""
    return parse_module(text).kernels["kernel"]


@pytest.mark.parametrize("schedule", ["eager", "random"])
def test_calls_with_structures_and_early_returns(schedule: str) -> None:
    """Threads return at different places and meet again."""
    out = np.zeros((32, 2), np.uint64)
    body = """
        cvt.u64.u32 %d5, %r0; add.s64 %d6, %d5, 1000;
        { .param .align 8 .b8 pair[16]; .param .align 8 .b8 result[16];
          st.param.b32 [pair], %r0; st.param.b64 [pair+8], %d6;
          call (result), both, (pair);
          ld.param.b32 %r1, [result]; ld.param.b64 %d7, [result+8]; }
        cvt.u64.u32 %d8, %r1; shfl.sync.bfly.b32 %r2, %r1, 0, 31, -1;
        mul.wide.u32 %d9, %r0, 16; add.s64 %d9, %d9, %d0;
        st.global.v2.b64 [%d9], {%d8, %d7};
    """
    execute(kernel(body), out, schedule=schedule)
    n = np.arange(32)
    assert np.array_equal(out[:, 0], n * (n + 1) // 2)
    assert np.array_equal(out[:, 1], np.where(n < 3, 0, n + 1000))


def test_recursion_and_unknown_functions_are_refused() -> None:
    recursive = """
    .func again() { call again, (); ret; }
    .extern .func malloc(.param .b64 size);
    """
    with pytest.raises(UnknownInstruction, match="recursive"):
        kernel("call again, ();", recursive)
    with pytest.raises(UnknownInstruction, match="malloc"):
        body = "{ .param .b64 size; st.param.b64 [size], 8; call malloc, (size); }"
        execute(kernel(body, recursive), np.zeros(1, np.uint32))
    with pytest.raises(UnknownInstruction, match="direct calls"):
        kernel("call %d5, (), prototype;")


def test_module_variables_live_on_between_launches() -> None:
    out = np.zeros(32, np.uint32)
    module = kernel("""
        atom.global.add.u32 %r1, [total], 1; mov.u64 %d5, weights;
        ld.global.b32 %r2, [weights+8]; cvt.rzi.u32.f32 %r2, %r2;
        ld.const.u16 %h1, [table+2]; cvt.u32.u16 %r3, %h1;
        add.u32 %r4, %r1, %r2; add.u32 %r4, %r4, %r3;
        add.s64 %d6, %d0, %d30; st.global.b32 [%d6], %r4;
    """)  # fmt: skip
    for launch in range(2):
        execute(module, out)
        assert np.array_equal(out, 5 + 32 * launch + np.arange(32) + 3 + 16)
    with pytest.raises(EmulationError, match="read-only variable table"):
        execute(kernel("mov.u64 %d5, table; st.global.b32 [%d5], 1;"), out)


def test_printf(capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        setp.gt.u32 %p1, %r0, 1; @%p1 bra DONE;
        mov.u64 %d5, frame; cvta.local.u64 %d6, %d5;
        st.local.b32 [frame], %r0; mov.b64 %d7, 0d3FF8000000000000; st.local.b64 [frame+8], %d7;
        st.local.b64 [frame+16], -3; mov.u64 %d8, word; cvta.global.u64 %d8, %d8;
        st.local.b64 [frame+24], %d8; mov.u64 %d9, form; cvta.global.u64 %d9, %d9;
        { .param .b64 a; .param .b64 b; .param .b32 c;
          st.param.b64 [a], %d9; st.param.b64 [b], %d6;
          call.uni (c), vprintf, (a, b); }
    DONE:
    """
    outcome = execute(kernel(body), np.zeros(1, np.uint32))
    assert capsys.readouterr().out == "0 1.50 -3 abc%\n1 1.50 -3 abc%\n"
    assert "".join(outcome.counters.printed) == "0 1.50 -3 abc%\n1 1.50 -3 abc%\n"
    assert outcome.counters.global_load_bytes == 0
