"""What stands in docs/strategies that is made: pictures and grids of plans, numbers from the result files, lines of code."""
