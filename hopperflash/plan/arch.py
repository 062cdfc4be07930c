"""What a plan needs to know of the machine it is made for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from hopperflash.errors import InvalidArgument

KIB = 1024
# Its only member is listed, and its instructions are not its successors'.
HOPPER_MAJOR = 9

AMPERE_FEATURES = frozenset({"mma_sync", "cp_async"})
# From 9.0 on a kernel can start while the one before it ends.
NEWER_FEATURES = AMPERE_FEATURES | {"dependent_launch"}
HOPPER_FEATURES = NEWER_FEATURES | {"tma", "wgmma", "setmaxnreg"}


@dataclass(frozen=True)
class ArchSpec:
    """A compile target and its limits; shared memory in bytes, per block as a kernel may opt in to.

    `name` is what the compiler is told. `sms` and `l2_bytes` are those of the device where there is
    one, else of a common part. The "cpu" target has no limits, no features and no SMs.
    """

    name: str
    compute_capability: tuple[int, int]
    smem_bytes_per_block: int
    smem_bytes_per_sm: int
    features: frozenset[str] = AMPERE_FEATURES
    registers_per_sm: int = 65536
    max_registers_per_thread: int = 255
    sms: int = 0
    l2_bytes: int = 0


class Part(NamedTuple):
    """What differs between GPUs of a target."""

    sms: int
    l2_mib: int


def _gpu(
    name: str, capability: tuple[int, int], smem_kib: int, features: frozenset[str], part: Part
) -> ArchSpec:
    """A GPU with `smem_kib` per SM, of which the driver keeps 1 KiB per resident block."""
    smem = ((smem_kib - 1) * KIB, smem_kib * KIB)
    return ArchSpec(
        name, capability, *smem, features, sms=part.sms, l2_bytes=part.l2_mib * KIB * KIB
    )


CPU = ArchSpec("cpu", (0, 0), 0, 0, frozenset())

# Shared memory per SM: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability". Blackwell has no wgmma and runs the Ampere kernels. Parts, by their data sheets:
# A100, A10, Orin, L40S, H100 SXM and H200, B200, B300, RTX 5090, GB10.
ARCHS = (
    CPU,
    _gpu("sm_80", (8, 0), 164, AMPERE_FEATURES, Part(108, 40)),
    _gpu("sm_86", (8, 6), 100, AMPERE_FEATURES, Part(72, 6)),
    _gpu("sm_87", (8, 7), 164, AMPERE_FEATURES, Part(16, 4)),
    _gpu("sm_89", (8, 9), 100, AMPERE_FEATURES, Part(142, 96)),
    _gpu("sm_90a", (9, 0), 228, HOPPER_FEATURES, Part(132, 50)),
    _gpu("sm_100a", (10, 0), 228, NEWER_FEATURES, Part(148, 126)),
    _gpu("sm_103a", (10, 3), 228, NEWER_FEATURES, Part(148, 126)),
    _gpu("sm_120a", (12, 0), 100, NEWER_FEATURES, Part(170, 96)),
    _gpu("sm_121a", (12, 1), 100, NEWER_FEATURES, Part(48, 24)),
)


def arch_of(name: str) -> ArchSpec:
    """The target called `name`, with or without "_" and "a": "sm_90a", "sm90", "SM_90".

    Raises `InvalidArgument` for a target that is not in `ARCHS`.
    """

    def bare(text: str) -> str:
        return text.lower().replace("_", "").removesuffix("a")

    for arch in ARCHS:
        if bare(arch.name) == bare(str(name)):
            return arch
    known = ", ".join(arch.name for arch in ARCHS)
    raise InvalidArgument(f"unknown arch {name!r}: give one of {known}")


def arch_of_capability(capability: tuple[int, int]) -> ArchSpec:
    """The target of a GPU by its compute capability, such as (9, 0).

    Raises `InvalidArgument` below 8.0, and for a generation that is not in `ARCHS`. An unlisted
    member of a listed generation takes code for that generation's first, which it can execute, and
    the least shared memory of all.
    """
    major, minor = capability
    generation = [arch for arch in ARCHS[1:] if arch.compute_capability[0] == major]
    for arch in generation:
        if arch.compute_capability == (major, minor):
            return arch
    if generation and major != HOPPER_MAJOR:
        return replace(
            generation[0],
            name=generation[0].name.removesuffix("a"),
            compute_capability=(major, minor),
            smem_bytes_per_block=min(arch.smem_bytes_per_block for arch in ARCHS[1:]),
            smem_bytes_per_sm=min(arch.smem_bytes_per_sm for arch in ARCHS[1:]),
        )
    known = ", ".join(arch.name for arch in ARCHS[1:])
    why = "the kernels need 8.0 or newer" if (major, minor) < (8, 0) else "no target for it"
    raise InvalidArgument(f"compute capability {major}.{minor}: {why}; known are {known}")
