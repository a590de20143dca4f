"""Other libraries' kernels as backends."""

FLEX = "flex"
"""Name of FlexAttention, as a backend and as a subject of benchmarks."""
