"""Attention in models of other libraries; a module is imported with the library it integrates."""
