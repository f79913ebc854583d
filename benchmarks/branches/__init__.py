"""What `torch.compile(model, backend="dynaflow")` gains on models with independent branches: `python -m benchmarks.branches`.

See `__main__.py` for the options, docs/branches.md for the results.
"""
