"""`dap quality`: what a pattern costs in quality."""
