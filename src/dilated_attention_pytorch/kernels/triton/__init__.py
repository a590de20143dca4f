"""The portable Triton backend."""
