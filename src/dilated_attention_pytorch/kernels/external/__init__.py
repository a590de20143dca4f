"""Other libraries' kernels as backends."""
