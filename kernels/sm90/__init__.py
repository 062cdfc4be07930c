"""Hopper kernels: TMA loads and stores, warpgroup MMA, producer/consumer warp specialisation."""
