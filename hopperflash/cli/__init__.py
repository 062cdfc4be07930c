"""Commands: one file each, torch and cutlass imported only once a command runs."""
