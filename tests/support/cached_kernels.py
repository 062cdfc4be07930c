"""Stand-ins for compiled kernels, for tests of what is kept on disk."""

from __future__ import annotations

from hopperflash.emulator import HostObject
from hopperflash.plan import KernelSpec, arch_of, make_plan
from hopperflash.runtime.cache import CacheKey, key_of
from hopperflash.runtime.kernel import KernelBinary
from tests.support.problems import Sizes, problem

ENTRY = "hopperflash_fwd_sm90_bfloat16_d64x64_128x128_causal_0"


def spec_of(sizes: Sizes | None = None) -> KernelSpec:
    """The forward kernel of a problem for sm_90a."""
    plan = make_plan(problem(sizes, device="cuda"), arch_of("sm_90a"))
    return plan.calls[0].spec


def key(head_dim: int = 64) -> CacheKey:
    """The key of a kernel in this installation."""
    return key_of(spec_of(Sizes(head_dim=head_dim)))


def binary(content: bytes = b"object", size: int = 0) -> KernelBinary:
    """What no linker would take, padded with `size` bytes that do not compress."""
    padding = b"".join(bytes([i * i * 37 % 251, i * 101 % 256]) for i in range(size // 2))
    host = HostObject("kernel", ("mQ", "mK"), content, b"trampolines", ("_cudaGetDevice",))
    ptx = f".version 8.0\n.visible .entry {ENTRY}(\n"
    return KernelBinary(host, ptx, b"\x7fELF" + padding)
