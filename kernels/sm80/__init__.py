"""Ampere kernels, for every GPU from compute capability 8.0 on: mma.sync and cp.async."""
