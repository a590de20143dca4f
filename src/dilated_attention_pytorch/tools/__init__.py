"""What people run: the demo, the benchmark and the report they write. Standard library and torch only."""
