"""Memory-bound kernels around the attention kernels, for every architecture from sm_80 on."""
