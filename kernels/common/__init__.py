"""Architecture-neutral device code on (M, N) views of an accumulator."""
