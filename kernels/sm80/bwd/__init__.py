"""The Ampere backward: `kernel` wires, `mainloop` streams Q and dO, `epilogue` stores dK and dV."""
