"""Public kernels, unchanged, in the emulator: flash-attn-4 for sm_90 and CUTLASS's examples.

flash-attn-4 comes with `pip install hopperflash[conformance]`, CUTLASS's examples with a clone of
its repository: `pytest -m slow tests/emulated/test_public_kernels.py --cutlass-examples DIR`.
Without them these tests are skipped. Each runs in a process of its own, because the packages must
find a "GPU" when they are imported.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("flash_attn", "triton") if importlib.util.find_spec(name) is None]


def run_script(name: str, folder: Path, arch: str, *arguments: str, **environment: str) -> str:
    """What a script of tests/support prints; it keeps its PTX in a folder of its own."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    settings = {
        **os.environ, "CUTE_DSL_ARCH": arch, "CUTE_DSL_KEEP": "ptx", "PYTHONPATH": path,
        "CUTE_DSL_DUMP_DIR": str(folder), **environment,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", f"tests.support.{name}", *arguments], env=settings, text=True,
        capture_output=True, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(
    bool(MISSING),
    reason=f"{', '.join(MISSING)} not installed: pip install 'hopperflash[conformance]'",
)
@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize(("head_dim", "causal"), [(64, True), (128, False), (128, True)])
def test_flash_attention_4(head_dim: int, causal: bool, schedule: str, tmp_path: Path) -> None:
    run_script(
        "flash_attention_4", tmp_path, "sm_90a", schedule, str(head_dim), str(int(causal)),
        FLASH_ATTENTION_ARCH="sm_90",
    )  # fmt: skip


# Target, example under cute/, its arguments; and the broken rule that the example does have.
EXAMPLES = [
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm.py", "--mnkl 256,128,128,1", ""),
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm.py",
     "--mnkl 256,256,192,2 --cluster_shape_mn 2,1 --a_major m --b_major n --c_major m", ""),
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm.py",
     "--mnkl 128,128,128,1 --a_dtype Float8E4M3FN --b_dtype Float8E5M2", ""),
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm_persistent.py", "--mnkl 512,256,128,1", ""),
    # Reads the accumulators of a promotion, then issues the next wgmma with no fence.
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm_fp8_2xacc.py", "--mnkl 256,128,256,1",
     "missing wgmma.fence"),
    ("sm_90a", "hopper/kernel/dense_gemm/dense_gemm_fp8_gelu_persistent.py",
     "--mnkl 256,256,128,1", ""),
    ("sm_90a", "hopper/kernel/grouped_gemm/grouped_gemm.py",
     "--num_groups 2 --problem_sizes_mnkl (128,128,128,1),(256,128,64,1)", ""),
    ("sm_90a", "hopper/kernel/cta_norm/cta_norm.py", "--M 8 --N 1024", ""),
    # Exits while its last bulk store may still read shared memory.
    ("sm_90a", "hopper/kernel/attention/fmha.py", "--q_shape 1,128,2,128 --k_shape 1,256,1,128",
     "bulk store never waited for"),
    ("sm_90a", "hopper/kernel/attention/fmha.py",
     "--q_shape 1,200,1,64 --k_shape 1,200,1,64 --is_causal", "bulk store never waited for"),
    ("sm_80", "ampere/kernel/dense_gemm/tensorop_gemm.py", "--mnkl 128,128,64,1", ""),
    ("sm_80", "ampere/kernel/dense_gemm/sgemm.py", "--mnk 128,128,64", ""),
    ("sm_80", "ampere/kernel/attention/flash_attention_v2.py",
     "--batch_size 1 --seqlen_q 128 --seqlen_k 192 --num_head 1 --is_causal", ""),
    ("sm_80", "ampere/kernel/attention/hstu_attention.py",
     "--batch_size 1 --seqlen_q 128 --seqlen_kv 128 --num_head 1 --head_dim 64", ""),
    ("sm_80", "ampere/kernel/elementwise/elementwise_add.py", "--M 128 --N 256", ""),
    ("sm_80", "ampere/kernel/elementwise/elementwise_apply.py", "--M 128 --N 256", ""),
]  # fmt: skip


@pytest.mark.parametrize("schedule", ["eager", "lazy"])
@pytest.mark.parametrize(
    ("arch", "example", "arguments", "finding"), EXAMPLES,
    ids=[f"{Path(example).stem} {arguments}" for _, example, arguments, _ in EXAMPLES],
)  # fmt: skip
def test_cutlass_examples(
    arch: str, example: str, arguments: str, finding: str, schedule: str, tmp_path: Path,
    pytestconfig: pytest.Config,
) -> None:  # fmt: skip
    """Each compares its results with torch itself, and has no hazard but the one named here."""
    folder = pytestconfig.getoption("--cutlass-examples")
    if folder is None:
        pytest.skip("--cutlass-examples does not say where CUTLASS's examples/python/CuTeDSL is")
    path = Path(folder).resolve() / "cute" / example
    printed = run_script(
        "cutlass_example", tmp_path, arch, arch, schedule, str(path), *arguments.split()
    )
    hazards = re.findall(r"^hazard: (.*)", printed, re.MULTILINE)
    assert bool(hazards) == bool(finding), hazards
    assert all(hazard.startswith(finding) for hazard in hazards)
