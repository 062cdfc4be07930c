"""Our kernels under Nsight Compute, Nsight Systems and IKET; docs/profiling.md."""
