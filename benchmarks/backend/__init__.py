"""What being under DynaFlow costs: `python -m benchmarks.backend`. See `__main__.py` for the options, docs/backend.md for the results."""
