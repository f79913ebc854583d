"""Measurements and evidence: each suite is a command, `python -m benchmarks.<suite>`."""
