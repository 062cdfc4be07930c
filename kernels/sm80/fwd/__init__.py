"""The Ampere forward: `kernel` wires, `mainloop` streams K and V, `epilogue` stores."""
