"""Modules with learned sparsity."""
