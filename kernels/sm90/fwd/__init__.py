"""The Hopper forward: `kernel` wires, `load`, `mma` and `epilogue` are the warp roles."""
