"""Kinds of failures that users of other attention kernels reported, as tests with the right values.

Each cites its kind by letter and number of the project's list: A masks that hide everything, B the
meaning of masks, C layouts, F grouped heads, G what lies beyond lengths, H determinism, J torch,
L padding. Sizes (D38 to D42) are in `test_offsets.py`; paddings of head dims and shapes of every
kind (E46 to E52, E55), the maximum of rows whose first blocks are hidden (H71) and the GPU that
tensors lie on (I73) in the named cases and `test_devices.py`. Scratch is NaN in every emulated run
(G64), and memory that is touched before griddepcontrol.wait a hazard (H65).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import hopperflash
from hopperflash import InvalidArgument, UnsupportedProblem
from hopperflash.problem import GRADIENTS, MaskSpec
from hopperflash.runtime import compile as compiling
from tests.support.drawn import Drawn, Variant, check
from tests.support.sequences import Attended, check_results, dense_rows

pytestmark = [pytest.mark.emulated]

ARCHS = [
    pytest.param("cpu", marks=pytest.mark.xdist_group("kinds-cpu")),
    pytest.param("sm_90a", marks=pytest.mark.xdist_group("kinds-sm90")),
    pytest.param("sm_80", marks=[pytest.mark.xdist_group("kinds-sm80"), pytest.mark.slow]),
]
on_every_backend = pytest.mark.parametrize("arch", ARCHS)


@contextmanager
def backend(arch: str) -> Iterator[None]:
    """CPU tensors on the cpu backend, or in the emulator without a hazard."""
    with nullcontext() if arch == "cpu" else hopperflash.emulate(arch) as run:
        yield
    assert run is None or run.hazards == []


def check_packed(
    arch: str, *lengths: tuple[int, int], heads: tuple[int, int] = (1, 1), **fields: Any
) -> None:
    """Everything of causal packed sequences against fp64, NaN in rows that do not count."""
    variant = Variant(
        *(torch.bfloat16, 64, 64), causal=True, window=False, softcap=False, packed=True,
        deterministic=False, gradients=GRADIENTS, group=heads[1],
    )  # fmt: skip
    gaps = fields.pop("gaps", (0, 0, 0))
    drawn = Drawn(
        *(variant, lengths, gaps, heads[0], fields.get("head_dim", 64), 64, (-1, -1), 0.0),
        layouts=("contiguous",) * 4, uses_lse=True, seed=0,
    )  # fmt: skip
    check(drawn, arch)


def qkv(seqlen_q: int = 70, seqlen_k: int = 70, heads: tuple[int, int] = (2, 2)) -> list[Tensor]:
    shapes = ((1, seqlen_q, heads[0], 64), *[(1, seqlen_k, heads[1], 64)] * 2)
    return [torch.randn(shape).half().requires_grad_() for shape in shapes]


def results(
    operands: list[Tensor], dout: Tensor | None = None, **options: Any
) -> dict[str, Tensor]:
    """Output, LSE and gradients of a dense problem."""
    out, lse = hopperflash.flash_attn_func(*operands, return_lse=True, **options)
    gradients = torch.autograd.grad(out, operands, torch.ones_like(out) if dout is None else dout)
    return {"out": out, "lse": lse, **dict(zip(GRADIENTS, gradients, strict=True))}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    for name, result in wanted.items():
        assert torch.equal(found[name], result), name


@on_every_backend
def test_a1_queries_before_the_first_key_have_no_nan_gradients(arch: str) -> None:
    check_packed(arch, (76, 1), (34, 1), (146, 1), head_dim=32)


@on_every_backend
def test_a3_a4_a5_rows_without_keys_are_zero_and_minus_infinity(arch: str) -> None:
    operands = qkv(seqlen_q=140, seqlen_k=70)
    with backend(arch):
        found = results(operands, causal=True)
    assert not found["out"][:, :70].any() and not found["dq"][:, :70].any()
    assert (found["lse"][:, :, :70] == -math.inf).all()
    assert found["lse"][:, :, 70:].isfinite().all()
    assert all(x.isfinite().all() for x in (found["out"], found["dq"], found["dk"], found["dv"]))


@on_every_backend
def test_a15_several_tiles_without_keys_do_not_hang(arch: str) -> None:
    """Two heads of 500 queries, of which the first 440 see no key."""
    q, k, v = qkv(500, 60)
    with backend(arch):
        out, lse = hopperflash.flash_attn_func(q, k, v, causal=True, return_lse=True)
    assert (out[:, :440] == 0).all()
    assert (lse[:, :, :440] == -math.inf).all()
    assert lse[:, :, 440:].isfinite().all()


@on_every_backend
def test_a8_sequences_without_queries_have_zero_key_gradients(arch: str) -> None:
    check_packed(arch, (0, 253), (120, 174), (84, 84), (0, 130), heads=(1, 4))


@on_every_backend
@pytest.mark.parametrize("seqlen_q", [1, 64, 128, 256])
def test_a11_a12_a13_no_keys_and_no_queries_need_no_kernel(arch: str, seqlen_q: int) -> None:
    for lengths in ((seqlen_q, 0), (0, seqlen_q)):
        for causal in (False, True):
            with backend(arch):
                found = results(qkv(*lengths), causal=causal)
            assert not any(found[name].any() for name in ("out", *GRADIENTS))


@on_every_backend
def test_b17_a_window_over_everything_is_causal(arch: str) -> None:
    operands = qkv()
    with backend(arch):
        wide, causal = results(operands, window_size=(69, 0)), results(operands, causal=True)
    for name, result in causal.items():
        assert torch.allclose(wide[name], result, atol=2e-3, rtol=1e-2), name


def test_b18_bounds_below_minus_one_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="window_size right is -3"):
        hopperflash.flash_attn_func(*qkv(), causal=True, window_size=(-1, -3))


@on_every_backend
def test_b21_b22_minus_one_and_none_are_unbounded(arch: str) -> None:
    operands = qkv()
    with backend(arch):
        for causal, windows in (
            (False, [(-1, -1), (None, None)]),
            (True, [(-1, -1), (-1, 0), (None, -1)]),
        ):
            wanted = results(operands, causal=causal)
            assert wanted["out"].any()
            for window in windows:
                assert_same(results(operands, causal=causal, window_size=window), wanted)


@on_every_backend
def test_b24_bounds_are_inclusive(arch: str) -> None:
    """Equal scores: the LSE is the logarithm of how many keys a row sees."""
    q, k, v = qkv()
    with backend(arch), torch.no_grad():
        _, lse = hopperflash.flash_attn_func(q * 0, k, v, window_size=(5, 3), return_lse=True)
    seen = [min(i, 5) + 1 + min(69 - i, 3) for i in range(70)]
    assert torch.allclose(lse[0, 0], torch.tensor(seen).log(), atol=1e-5)


@on_every_backend
def test_c27_c28_output_gradients_have_strides_of_their_own(arch: str) -> None:
    operands = qkv()
    dout = torch.randn(1, 2, 70, 64).half().transpose(1, 2)
    expanded = torch.ones(1, 1, 1, 1).half().expand(1, 70, 2, 64)
    with backend(arch):
        for view in (dout, dout.mT.contiguous().mT, expanded):
            found, wanted = results(operands, view), results(operands, view.contiguous())
            for name, result in wanted.items():
                assert torch.allclose(found[name], result, atol=2e-3, rtol=1e-2), name


@on_every_backend
def test_c31_keys_expanded_and_not_run_in_one_kernel_each_right(arch: str) -> None:
    q, k, v = (x.detach() for x in qkv())
    expanded = [x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v)]
    with backend(arch):
        for pair in (expanded, (k, v), expanded):
            found = hopperflash.flash_attn_func(q, *pair)
            dense = hopperflash.flash_attn_func(q, *(x.contiguous() for x in pair))
            assert torch.equal(found, dense)


@on_every_backend
def test_c34_slices_of_longer_tensors_keep_their_strides(arch: str) -> None:
    q, k, v = qkv(seqlen_k=198)
    sliced = [x.detach()[:, :-128].requires_grad_() for x in (k, v)]
    copies = [x.detach().contiguous().requires_grad_() for x in sliced]
    with backend(arch):
        assert_same(results([q, *sliced]), results([q, *copies]))


def test_c36_output_memory_that_is_shared_by_elements_is_refused() -> None:
    q, k, v = (x.detach() for x in qkv())
    with pytest.raises(InvalidArgument, match="its elements share memory"):
        hopperflash.flash_attn_func(q, k, v, out=q.new_empty(1, 1, 1, 64).expand(q.shape))


def test_d43_an_order_of_additions_takes_a_counter_a_query_tile() -> None:
    """Not a copy of dQ for every tile of keys."""
    q = torch.empty(1, 16384, 128, 192, dtype=torch.bfloat16, device="meta")
    v = torch.empty(1, 16384, 128, 128, dtype=torch.bfloat16, device="meta")
    racing, ordered = (
        hopperflash.make_plan(
            q, q, v, arch="sm_90a", direction="backward", deterministic=deterministic
        )
        for deterministic in (False, True)
    )
    added = sum(x.nbytes for x in ordered.workspaces) - sum(x.nbytes for x in racing.workspaces)
    tile_m = ordered.calls[1].spec.config.tile_m
    assert 0 < added <= 4 * 128 * math.ceil(16384 / tile_m)


@on_every_backend
def test_e54_results_do_not_depend_on_the_other_sequences(arch: str) -> None:
    q, k, v = (torch.randn(sum(n), 2, 64).half() for n in ((3, 70), (90, 50), (90, 50)))

    def attended(lengths_q: list[int], lengths_k: list[int], *operands: Tensor) -> Tensor:
        offsets = [
            torch.tensor([0, *n], dtype=torch.int32).cumsum(0) for n in (lengths_q, lengths_k)
        ]
        with backend(arch):
            found = hopperflash.flash_attn_varlen_func(*operands, *offsets, 70, 90)
        assert isinstance(found, Tensor)
        return found

    together = attended([3, 70], [90, 50], q, k, v)
    alone = attended([70], [50], q[3:], k[90:], v[90:])
    assert torch.equal(together[3:], alone)


@on_every_backend
@pytest.mark.parametrize("seqlen_q", [3, 70], ids=["f60 as many queries as heads", "f57"])
def test_f57_f60_grouped_heads_match_fp64(arch: str, seqlen_q: int) -> None:
    """A causal limit that counts folded rows for queries is wrong from the second head on."""
    operands = qkv(seqlen_q, 70, heads=(6, 2))
    dout = torch.randn(1, seqlen_q, 6, 64).half()
    with backend(arch):
        found = results(operands, dout, causal=True)
    rows = list(dense_rows(1, seqlen_q, 70))
    given = {name: x.detach()[0] for name, x in zip("qkv", operands, strict=True)}
    packed = {name: x.detach()[0] for name, x in found.items()}
    check_results(Attended(MaskSpec(None, 0), 0.125), {**given, "dout": dout[0]}, rows, packed)


@on_every_backend
def test_g61_nan_beyond_the_valid_keys_does_not_spread(arch: str) -> None:
    check_packed(arch, (32, 32), (64, 64), (96, 96), (48, 48), gaps=(0, 5, 0))


@on_every_backend
def test_h68_deterministic_gradients_are_equal_bit_for_bit(arch: str) -> None:
    operands = qkv(200, 200)
    dout = torch.randn(1, 200, 2, 64).half()
    options: dict[str, Any] = {"causal": True, "deterministic": True}
    with backend(arch):
        first = results(operands, dout, **options)
    for schedule, seed in (("eager", 0), ("random", 1), ("random", 2)):
        session = hopperflash.emulate(arch, schedule=schedule, seed=seed) if arch != "cpu" else None
        with session or nullcontext():
            assert_same(results(operands, dout, **options), first)


def test_j82_lengths_and_their_bounds_are_in_no_compile_key() -> None:
    q, k, v = (x.detach()[0] for x in qkv())
    compiled = []
    with hopperflash.emulate("sm_90a", hazards="basic"):
        for offsets, bound in (
            ((0, 70), 70),
            ((0, 5, 70), torch.tensor(70)),
            ((0, 0, 30, 60), torch.tensor(60, dtype=torch.int32)),
        ):
            cu_seqlens = torch.tensor(offsets)
            hopperflash.flash_attn_varlen_func(
                q, k, v, cu_seqlens, cu_seqlens, bound, bound, causal=True
            )
            compiled.append(len(compiling._kernels))
    assert compiled[0] == compiled[1] == compiled[2]


@on_every_backend
def test_j84_fp32_is_cast_under_autocast_and_refused_elsewhere(arch: str) -> None:
    q, k, v = (x.detach().float() for x in qkv())
    with pytest.raises(InvalidArgument, match=r"call inside torch\.autocast"):
        hopperflash.flash_attn_func(q, k, v)
    with backend(arch):
        with torch.autocast("cpu", dtype=torch.float16):
            out = hopperflash.flash_attn_func(q, k, v)
        assert torch.equal(out, hopperflash.flash_attn_func(q.half(), k.half(), v.half()))


def test_j85_second_derivatives_are_refused() -> None:
    operands = qkv()
    with hopperflash.emulate("sm_90a", hazards="basic"):
        out = hopperflash.flash_attn_func(*operands)
        (dq,) = torch.autograd.grad(out.sum(), operands[:1], create_graph=True)
        with pytest.raises(UnsupportedProblem, match="no second derivatives"):
            dq.sum().backward()


@on_every_backend
def test_l96_l97_padding_within_and_behind_sequences_is_no_key(arch: str) -> None:
    check_packed(arch, (9, 9), (8, 8), (8, 8), (12, 12), (8, 8), (12, 12), gaps=(0, 3, 0))
    check_packed(arch, (98, 98), gaps=(0, 6, 6))
