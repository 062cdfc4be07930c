"""The Hopper backward: `kernel` wires, `load`, `mma`, `store_dq` and `epilogue` are the roles."""
