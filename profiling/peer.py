"""flash-attn-4, compiled for sm_90a on a machine without a GPU: a development dependency.

pip install -e '.[conformance]'
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# What tells flash-attn-4 and the DSL which GPU to compile for.
ENVIRONMENT = {
    "CUTE_DSL_ARCH": "sm_90a",
    "CUTE_DSL_KEEP_CUBIN": "1",
    "FLASH_ATTENTION_ARCH": "sm_90a",
    "FLASH_ATTENTION_NUM_SMS": "132",
}
KERNELS = {
    "forward": "FlashAttentionForwardSm90",
    "backward": "FlashAttentionBackwardSm90",
}
BATCH, SEQLEN, HEADS = 2, 1024, 8  # lengths do not reach its code
WINDOW = 256


@dataclass(frozen=True)
class PeerKernel:
    """A main kernel: its tile, the warpgroups that compute, and what the compiler made of it."""

    tile_m: int
    tile_n: int
    head_dim: int
    head_dim_v: int
    warpgroups: int
    dq_warpgroups: int
    """Of a backward: those that compute dQ; where they are not all, each has a loop of its own."""
    cubin: bytes

    def save(self, folder: Path, name: str) -> None:
        """Writes NAME.cubin and NAME.json."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = {key: value for key, value in vars(self).items() if key != "cubin"}
        (folder / f"{name}.json").write_text(json.dumps(facts))
        (folder / f"{name}.cubin").write_bytes(self.cubin)

    @classmethod
    def load(cls, folder: Path, name: str) -> PeerKernel:
        """Reads what `save` wrote."""
        facts = json.loads((folder / f"{name}.json").read_text())
        return cls(**facts, cubin=(folder / f"{name}.cubin").read_bytes())


@cache
def _dump_folder() -> tempfile.TemporaryDirectory[str]:
    """Of this process, for as long: the DSL reads its environment once."""
    return tempfile.TemporaryDirectory(prefix="hopperflash-")


def compile_peer(head_dim: int, head_dim_v: int, mask: str) -> dict[str, PeerKernel]:
    """The forward and the backward kernel of bf16 attention with as many key heads as heads."""
    os.environ.update(ENVIRONMENT | {"CUTE_DSL_DUMP_DIR": _dump_folder().name})
    import torch
    from flash_attn.cute import interface
    from torch._subclasses.fake_tensor import FakeTensorMode

    options: dict[str, Any] = {"causal": mask == "causal"}
    if mask == "window":
        options |= {"window_size_left": WINDOW, "window_size_right": 0}
    with compiled_by_cute() as compiled, FakeTensorMode():
        shape = (BATCH, SEQLEN, HEADS)
        q, k, v = (
            torch.empty(*shape, size, dtype=torch.bfloat16, device="cuda")
            for size in (head_dim, head_dim, head_dim_v)
        )
        out, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)
        interface._flash_attn_bwd(q, k, v, out, torch.empty_like(out), lse, **options)
    found = {type(host).__name__: _kernel(host, function) for host, function in compiled
             if type(host).__name__ in KERNELS.values()}  # fmt: skip
    return {direction: found[name] for direction, name in KERNELS.items()}


def _kernel(host: Any, function: Any) -> PeerKernel:
    return PeerKernel(
        tile_m=host.tile_m,
        tile_n=host.tile_n,
        head_dim=host.tile_hdim,
        head_dim_v=host.tile_hdimv,
        warpgroups=host.num_wg_mma,
        dq_warpgroups=getattr(host, "num_wg_dQ", host.num_wg_mma),
        cubin=function.__cubin__,
    )


@contextmanager
def compiled_by_cute() -> Iterator[list[tuple[Any, Any]]]:
    """Collects what `cute.compile` is given and makes of it, meanwhile."""
    import cutlass.cute as cute

    original = cute.compile
    compiled: list[tuple[Any, Any]] = []

    class Recorder:
        def __call__(self, host: Any, *args: Any, **options: Any) -> Any:
            function = original(host, *args, **options)
            compiled.append((host, function))
            return function

        def __getattr__(self, name: str) -> Any:
            return getattr(original, name)

    cute.compile = Recorder()
    try:
        yield compiled
    finally:
        cute.compile = original
