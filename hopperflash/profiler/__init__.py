"""Our kernels under Nsight Compute, Nsight Systems and IKET; docs/profiling.md."""

RANGE = "hopperflash "
"""How the name of a pass's NVTX range begins."""
