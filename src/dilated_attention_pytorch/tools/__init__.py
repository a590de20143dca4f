"""The command `dap`: inspection, plans, pictures, benchmarks, reports, training. Standard library and torch only."""
