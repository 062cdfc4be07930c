"""In-kernel event tracing: the command that shows the life of every warp of our kernels.

`run-iket` comes with CuTe DSL. It puts trampolines at a kernel's entry and exit, and at the marks
(`cute.experimental.iket`) in its body. Our kernels have no marks, so the trace is that of warps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hopperflash.profiler import tools
from hopperflash.profiler.tools import Command

TOOL = "run-iket"
_OLDEST = (9, 0)  # compute capability, by the DSL's documentation


def command(target: Sequence[str], folder: Path) -> Command:
    """The command that traces the warps of all kernels of the target into a page for Perfetto."""
    return Command((
        tools.find(TOOL) or TOOL, "--output-dir", str(folder), "--clobber", "profile",
        "--warp-trace", "--postprocess", "all", "--", *target,
    ))  # fmt: skip


def obstacles() -> list[str]:
    """Everything that keeps it from a GPU of this machine."""
    found = tools.obstacles(TOOL, counters=False)
    import torch

    if torch.cuda.is_available() and torch.cuda.get_device_capability() < _OLDEST:
        major, minor = torch.cuda.get_device_capability()
        found.append(f"this GPU has compute capability {major}.{minor}: IKET needs 9.0 or newer")
    return found
