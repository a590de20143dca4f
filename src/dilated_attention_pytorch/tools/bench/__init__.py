"""`dap bench`: cases, gates, timing and tables."""
