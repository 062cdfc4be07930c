"""The class of an instruction: which part of the machine it keeps busy."""

from __future__ import annotations

from .ptx_ir import Instruction

_BY_ROOT = {
    **dict.fromkeys(("bra", "ret", "exit", "call", "trap"), "control"),
    **dict.fromkeys(
        ("bar", "barrier", "mbarrier", "fence", "membar", "griddepcontrol", "nanosleep",
         "setmaxnreg"), "sync",
    ),
    **dict.fromkeys(("shfl", "vote", "elect", "match", "redux", "activemask"), "warp"),
    **dict.fromkeys(("ldmatrix", "stmatrix", "mapa", "getctarank"), "shared"),
    **dict.fromkeys(("cvt", "cvta"), "convert"),
    **dict.fromkeys(("prefetch", "prefetchu", "applypriority", "createpolicy"), "hint"),
    "tensormap": "async copy",
    "mma": "tensor",
}  # fmt: skip
_MEMORY = ("ld", "st", "ldu", "atom", "red")
_MEMORY_SPACES = ("shared", "local", "param", "const")


def class_of(ins: Instruction) -> str:
    """One of control, sync, warp, shared, global, ... for counting."""
    root = ins.parts[0]
    if root in _BY_ROOT:
        return _BY_ROOT[root]
    if root == "cp":
        return "async copy"
    if root == "wgmma":
        return "tensor" if ins.parts[1] == "mma_async" else "sync"
    if root in _MEMORY:
        spaces = (part.partition("::")[0] for part in ins.parts)
        return next((space for space in spaces if space in _MEMORY_SPACES), "global")
    if "approx" in ins.parts:
        return "mufu"
    return _arithmetic(ins.parts[-1], root)


def _arithmetic(kind: str, root: str) -> str:
    if root in ("mov", "selp", "setp", "slct"):
        return root
    if kind in ("f32", "f32x2"):
        return "fp32"
    if kind == "f64":
        return "fp64"
    return "fp16" if kind.startswith(("f16", "bf16")) else "integer"
