"""What the strategies of the field hide of an emulated network: `python -m benchmarks.overlap`."""
