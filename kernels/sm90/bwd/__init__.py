"""The Hopper backward: `kernel` wires, `load`, `mma`, `add_dq` and `epilogue` are the roles."""
