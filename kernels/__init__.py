"""Device code in CuTe DSL. Host code names kernels by string and imports them in one place."""
