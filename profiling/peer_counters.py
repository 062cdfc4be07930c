"""Counts what flash-attn-4's kernels do in the emulator: a process of its own, in which torch and
CuTe DSL believe that CPU tensors are on a Hopper GPU.

    python -m profiling.peer_counters SEQLEN HEAD_DIMS OUT

`profiling.compare_counters` starts it. The correctness of these runs is that of
`tests/support/flash_attention_4.py`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from profiling.compare_sass import head_dims_of
from profiling.peer import ENVIRONMENT, KERNELS, compiled_by_cute

SWITCH = {"CUTE_DSL_KEEP": "ptx"}


def main(seqlen: int, head_dims: Sequence[tuple[int, int]], out: Path) -> None:
    """Writes the counts of every case."""
    with tempfile.TemporaryDirectory(prefix="hopperflash-") as folder:
        os.environ.update(ENVIRONMENT | SWITCH | {"CUTE_DSL_DUMP_DIR": folder})
        found = _count_all(seqlen, head_dims)
    out.write_text(json.dumps(found))


def _count_all(seqlen: int, head_dims: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    from profiling.compare_counters import heads
    from profiling.counters import LaunchCount, PassCount, as_json, count_launch, period_of
    from tests.support.posing import launch_with, pose_as_gpu

    pose_as_gpu(9, 0)
    launches: list[LaunchCount] = []
    mains: list[Any] = []
    with compiled_by_cute() as compiled:

        def count(function: Any, *args: Any, **options: Any) -> None:
            (host,) = (host for host, made in compiled if made is function)
            period = 1
            if type(host).__name__ in KERNELS.values():
                mains.append(host)
                period = period_of(head.direction, host.tile_m, host.tile_n)
            launches.append(count_launch(function, *args, period=period, **options))

        launch_with(count)
        records = []
        for head in heads(head_dims, seqlen):
            launches.clear()
            _call(head)
            tile = mains[-1]
            found = PassCount(head, tile.tile_m, tile.tile_n, tuple(launches))
            print(f"{head}: {found.bytes} B", flush=True)
            records.append(as_json(found))
    return records


def _call(head: Any) -> None:
    from flash_attn.cute import interface

    x, mask = head.tensors(), head.mask
    inputs, options = (x["q"], x["k"], x["v"]), {"causal": mask.left is None and mask.right == 0}
    if mask.left is not None:
        options |= {"window_size_left": mask.left, "window_size_right": mask.right}
    if head.direction == "forward":
        interface._flash_attn_fwd(*inputs, return_lse=True, **options)
    else:
        interface._flash_attn_bwd(*inputs, x["out"], x["dout"], x["lse"], **options)


if __name__ == "__main__":
    main(int(sys.argv[1]), head_dims_of(sys.argv[2]), Path(sys.argv[3]))
