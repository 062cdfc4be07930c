"""Whole launches of small compiled kernels on CPU tensors, against torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute
import torch

from hopperflash.emulator import AddressError, DeviceView, EmulationError, EmulationRun, launch
from hopperflash.emulator.run import _program_of
from hopperflash.emulator.tensor_map import decode
from tests.support.sample_kernels import (
    ScaleRows,
    Scaling,
    SmallGemm,
    TmaCopy,
    compile_kernel,
    fake_matrix,
)

pytestmark = pytest.mark.emulated

SCHEDULES = ["eager", "lazy", "random"]
DTYPES = {
    torch.float16: cutlass.Float16,
    torch.bfloat16: cutlass.BFloat16,
    torch.float32: cutlass.Float32,
}


class Compiled(NamedTuple):
    """A compiled function and how to call it on torch tensors."""

    function: Any
    call: Callable[..., EmulationRun]


def compile_for_cpu(host: Any, *tensors: torch.Tensor, tvm_ffi: bool = True) -> Compiled:
    fakes = [fake_matrix(DTYPES[t.dtype], leading=t.stride().index(1)) for t in tensors]
    function = compile_kernel(host, *fakes, tvm_ffi=tvm_ffi)

    def call(*args: torch.Tensor, **options: Any) -> EmulationRun:
        if tvm_ffi:
            return launch(function, *args, **options)
        from cuda.bindings.driver import CUstream
        from cutlass.cute.runtime import from_dlpack

        views = [
            from_dlpack(DeviceView(t), assumed_align=16).mark_layout_dynamic(t.stride().index(1))
            for t in args
        ]
        return launch(function, *views, CUstream(0), **options)

    return Compiled(function, call)


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


@pytest.fixture(scope="module")
def copy() -> Compiled:
    x = matrix(1, 8, torch.float16)
    return compile_for_cpu(TmaCopy((64, 64), "SW128"), x, x)


@pytest.mark.parametrize("tvm_ffi", [True, False], ids=["tvm_ffi", "plain"])
@pytest.mark.parametrize("swizzle", ["INTER", "SW32", "SW64", "SW128"])
def test_tma_copy(swizzle, tvm_ffi):
    """Boundary tiles included: loads fill zeros and stores clip."""
    src = matrix(100, 136, torch.float16)
    copy = compile_for_cpu(TmaCopy((64, 64), swizzle), src, src, tvm_ffi=tvm_ffi)
    for schedule in SCHEDULES:
        padded = torch.full((102, 136), -1.0, dtype=torch.float16)
        run = copy.call(src, padded[1:101], schedule=schedule)
        assert torch.equal(padded[1:101], src)
        assert (padded[0] == -1).all() and (padded[101] == -1).all()
        assert run.hazards == []
        assert run.counters["tma_load_bytes"] == run.counters["tma_store_bytes"] == src.nbytes
        (info,) = run.launches
        assert (info.grid, info.block, info.cluster) == ((2, 3, 1), (32, 1, 1), (1, 1, 1))
        assert "TmaCopy" in info.kernel_name


@pytest.mark.parametrize("tvm_ffi", [True, False], ids=["tvm_ffi", "plain"])
@pytest.mark.parametrize("b_major", ["K", "MN"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_gemm(dtype, b_major, tvm_ffi):
    a, b = matrix(130, 200, dtype), matrix(72, 200, dtype, seed=1)
    b = b if b_major == "K" else b.T.contiguous().T
    c = torch.empty(130, 72)
    gemm = compile_for_cpu(SmallGemm(32, 64, b_major), a, b, c, tvm_ffi=tvm_ffi)
    for schedule in SCHEDULES:
        c.fill_(torch.nan)
        run = gemm.call(a, b, c, schedule=schedule)
        torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)
        assert run.hazards == []
        tiles = 3 * 3
        steps = 4 * 4
        assert run.counters["wgmma"] == tiles * steps
        assert run.counters["wgmma_flops"] == tiles * steps * 2 * 64 * 32 * 16
        assert run.counters["ctas"] == tiles


@pytest.mark.parametrize(
    ("b_major", "tile_n", "tile_k"),
    [
        ("K", 8, 16),  # 32-byte swizzle
        ("K", 24, 32),  # 64-byte swizzle
        ("K", 256, 64),
        ("MN", 16, 64),  # 32-byte swizzle
        ("MN", 32, 64),  # 64-byte swizzle
        ("MN", 128, 32),
    ],
)
def test_gemm_tiles_reach_every_swizzle(b_major, tile_n, tile_k):
    a, b = matrix(64, 128, torch.bfloat16), matrix(tile_n, 128, torch.bfloat16, seed=1)
    b = b if b_major == "K" else b.T.contiguous().T
    c = torch.empty(64, tile_n)
    compile_for_cpu(SmallGemm(tile_n, tile_k, b_major), a, b, c).call(a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)


def test_runs_accumulate_and_report(copy):
    src = matrix(64, 64, torch.float16)
    run = copy.call(src, torch.empty_like(src))
    again = copy.call(src, torch.empty_like(src), run=run)
    assert again is run
    assert len(run.launches) == 2
    assert run.counters["tma_load_bytes"] == 2 * src.nbytes
    report = run.report()
    assert "1x1x1" in report and "tma_load_bytes" in report and "no hazards" in report
    run.hazards.append("something raced")
    assert "something raced" in run.report()


def test_keyword_arguments(copy):
    src = matrix(64, 64, torch.float16)
    dst = torch.zeros_like(src)
    launch(copy.function, src, dst=dst)
    assert torch.equal(dst, src)


def test_defaults_dataclasses_and_a_stream_in_the_middle(tmp_path):
    factors = cute.runtime.make_fake_tensor(cutlass.Float32, (cute.sym_int(),), (1,))
    compiled = cute.compile(
        ScaleRows(),
        fake_matrix(cutlass.Float32),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        Scaling(factors, cutlass.Float32(0)),
        rows=cutlass.Int32(1),
        options=f"--gpu-arch sm_90a --keep-ptx --enable-tvm-ffi --dump-dir {tmp_path}",
    )
    x, factors = matrix(5, 40, torch.float32), torch.arange(5.0)
    for gain in ((), (3.0,)):
        y = x.clone()
        launch(compiled, y, Scaling(factors, 1.5), *gain, rows=5)
        expected = x * factors[:, None] * (gain[0] if gain else 2.0) + 1.5
        torch.testing.assert_close(y, expected)


def test_progress_counts_ctas(copy):
    src = matrix(128, 192, torch.float16)
    seen = []
    copy.call(src, torch.empty_like(src), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)


def test_exceptions_inside_a_launch_come_out_and_do_no_harm(copy):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    src = matrix(64, 64, torch.float16)
    dst = torch.zeros_like(src)
    with pytest.raises(KeyboardInterrupt):
        copy.call(src, dst, progress=interrupt)
    copy.call(src, dst)
    assert torch.equal(dst, src)


def test_host_checks_keep_their_messages(copy):
    src = matrix(64, 64, torch.float16)
    with pytest.raises(ValueError, match=r"expected dtype=float16"):
        copy.call(src.float(), src)
    with pytest.raises(ValueError, match=r"expected ndim=2"):
        copy.call(src[0], src)
    with pytest.raises(TypeError, match="dst"):
        copy.call(src)


def test_kept_ptx_is_required():
    compiled = compile_for_cpu(TmaCopy((64, 64)), *[matrix(1, 8, torch.float16)] * 2).function
    compiled.artifacts.PTX = None
    with pytest.raises(EmulationError, match="--keep-ptx"):
        launch(compiled)


def test_device_views_compile_global_accesses():
    """Compile-time examples may be CPU tensors too, when they pose as device tensors."""
    from cutlass.cute.runtime import from_dlpack

    a, b, c = matrix(64, 64, torch.float16), matrix(64, 64, torch.float16), torch.empty(64, 64)
    views = [
        from_dlpack(DeviceView(t), assumed_align=16, enable_tvm_ffi=True).mark_layout_dynamic(1)
        for t in (a, b, c)
    ]
    compiled = compile_kernel(SmallGemm(64, 64), *views)
    assert "st.global" in compiled.__ptx__
    launch(compiled, a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float().T, rtol=1e-5, atol=1e-4)


def test_ptx_of_another_kernel_is_noticed(copy):
    x = matrix(64, 64, torch.float16)
    compiled = compile_for_cpu(TmaCopy((64, 64)), x, x).function
    compiled.artifacts.PTX = compiled.artifacts.PTX.replace("TmaCopy", "Another")
    with pytest.raises(EmulationError, match="CUTE_DSL_DUMP_DIR"):
        launch(compiled, x, x.clone())


def test_tensor_maps_of_host_code_decode(copy):
    """The descriptors that compiled host code builds describe the tensors it was given."""
    whole = torch.empty(2, 90, 136, dtype=torch.float16)
    captured = []
    _program_of(copy.function).host.run((whole[0], whole[1]), {}, captured.append)
    src, dst = (decode(captured[0].parameters[i]) for i in (0, 2))
    for tensor_map, tensor in ((src, whole[0]), (dst, whole[1])):
        assert tensor_map.address == tensor.data_ptr()
        assert tensor_map.dims == (136, 90)
        assert tensor_map.strides == (2, 272)
        assert (tensor_map.box, tensor_map.swizzle) == ((64, 64), 128)
        assert tensor_map.element == ("f16", 2)


def test_memory_outside_the_arguments_is_refused(copy):
    """A tensor map that reaches past its tensor names the nearest argument."""
    program = _program_of(copy.function)
    src = matrix(64, 64, torch.float16)
    raw = bytearray()
    program.host.run((src, src), {}, lambda launched: raw.extend(launched.parameters[0]))
    assert decode(bytes(raw)).address == src.data_ptr()
    from hopperflash.emulator.memory import GlobalMemory
    from hopperflash.emulator.tensor_map import load_box

    memory = GlobalMemory()
    memory.add(src.data_ptr(), src.nbytes // 2, "src")
    with pytest.raises(AddressError, match="src"):
        load_box(decode(bytes(raw)), (0, 0), memory)


def test_equal_ptx_is_decoded_once():
    x = matrix(64, 64, torch.float16)
    first, second = (compile_for_cpu(TmaCopy((64, 32)), x, x) for _ in range(2))
    modules = [_program_of(c.function).module for c in (first, second)]
    assert modules[0] is modules[1]
    for c in (first, second):
        out = torch.zeros_like(x)
        assert c.call(x, out).counters["ctas"] == 2
        assert torch.equal(out, x)


def test_some_ctas_of_a_grid(copy):
    src = matrix(256, 256, torch.float16)
    for ctas, rows in ((lambda index: index[1] == 0 and index[0] < 2, 128), (4, None), (1, None)):
        dst = torch.zeros_like(src)
        run = copy.call(src, dst, ctas=ctas)
        written = (dst != 0).sum().item() / 64**2
        expected = 2 if rows else ctas
        assert run.launches[0].ctas_run == run.counters["ctas"] == expected
        assert written == pytest.approx(expected, rel=0.01)
        assert run.counters["tma_load_bytes"] == expected * 64 * 64 * 2
        if rows:
            assert torch.equal(dst[:128, :64], src[:128, :64])


class Greeting:
    """Prints from one thread."""

    @cute.jit
    def __call__(self, src: cute.Tensor, stream: Any) -> None:
        self.kernel(src).launch(grid=(1, 1, 1), block=(1, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, src: cute.Tensor) -> None:
        cute.printf("%d of %d", src[0, 0], src[0, 1])


def test_what_a_kernel_prints_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    src = torch.tensor([[3, 4, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    run = launch(compile_kernel(Greeting(), fake_matrix(cutlass.Int32)), src)
    assert run.printed == capsys.readouterr().out == "3 of 4\n"
