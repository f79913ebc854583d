"""Serving with vLLM, plain and under strategies: `python -m benchmarks.vllm_serving` (see `__main__.py`)."""
