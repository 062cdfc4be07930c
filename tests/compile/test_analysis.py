"""Resources and SASS of compiled kernels."""

import pytest

pytest.importorskip("cutlass")

import cutlass
import cutlass.cute as cute

from hopperflash import analysis
from hopperflash.analysis.sass import parse_listing
from hopperflash.errors import HopperflashError
from tests.support.sample_kernels import SmallGemm, compile_kernel, fake_matrix

pytestmark = pytest.mark.compile


class Spilling:
    """Indexes a register array with a run-time value, which puts it in local memory."""

    @cute.jit
    def __call__(self, x: cute.Tensor, stream: object) -> None:
        self.kernel(x).launch(grid=(1, 1, 1), block=(32, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, x: cute.Tensor) -> None:
        values = cute.make_rmem_tensor(cute.make_layout(32), cutlass.Float32)
        thread = cute.arch.thread_idx()[0]
        for i in cutlass.range_constexpr(32):
            values[i] = x[thread, i]
        position = cutlass.Int32(0)
        for i in range(x.shape[0]):
            position = (position * 5 + thread + i) % 32
            values[position] = values[(position + 7) % 32] + 1.0
        for i in cutlass.range_constexpr(32):
            x[thread, i] = values[i]


def cubin_of(host, *tensors):
    return compile_kernel(host, *tensors, keep="--keep-cubin").artifacts.CUBIN


@pytest.fixture(scope="module")
def gemm():
    half, full = fake_matrix(cutlass.BFloat16), fake_matrix(cutlass.Float32)
    (kernel,) = analysis.inspect_cubin(cubin_of(SmallGemm(64, 64), half, half, full))
    return kernel


def test_resources_of_a_clean_kernel(gemm):
    assert "SmallGemm" in gemm.name
    assert 32 < gemm.registers < 128
    assert gemm.stack_bytes == gemm.local_bytes == 0


def test_instructions_of_the_gemm(gemm):
    assert gemm.sass.count("HGMMA") == 64 // 16
    assert gemm.sass.count("HGMMA.64x64x16") == 4
    assert gemm.sass.count("UTMALDG") == 2
    assert gemm.sass.count("HG") == 0
    assert gemm.sass.count("EXIT") >= 1
    assert sum(gemm.sass.opcodes.values()) == len(gemm.sass.instructions)
    addresses = [instruction.address for instruction in gemm.sass.instructions]
    assert addresses == list(range(0, 16 * len(addresses), 16))
    targets = {i.operands for i in gemm.sass.instructions if i.opcode == "BRA"}
    assert any(label in target for label in gemm.sass.labels for target in targets)


def test_local_memory_is_seen():
    (kernel,) = analysis.inspect_cubin(cubin_of(Spilling(), fake_matrix(cutlass.Float32)))
    assert kernel.stack_bytes >= 128
    assert kernel.local_bytes > 0
    assert kernel.sass.count("STL") + kernel.sass.count("LDL") > 0


def test_predicates_and_widths():
    (listing,) = parse_listing(
        '\t.section\t.text.k,"ax"\n.L_x_1:\n'
        "        /*0000*/              @!P0 LDL.64 R2, [R1+0x8] ;\n"
        "        /*0010*/                   STL.128 [R1], R4 ;\n"
        "        /*0020*/                   STL [R1], R4 ;\n"
    ).values()
    assert listing.labels == {".L_x_1": 0}
    assert [i.predicate for i in listing.instructions] == ["!P0", "", ""]
    assert listing.local_bytes == 8 + 16 + 4


def test_refusals(monkeypatch):
    with pytest.raises(HopperflashError, match="not a cubin"):
        analysis.inspect_cubin(b"PTX, perhaps")
    monkeypatch.setattr("importlib.metadata.files", lambda _: None)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(analysis.DisassemblerMissing, match="pip install nvidia-cuda-nvdisasm"):
        analysis.find_nvdisasm()
