"""What a GPU machine compiles, compiled where there is none: `python -m benchmarks.ahead --help`."""
