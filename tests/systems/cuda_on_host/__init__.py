"""CUDA without a GPU, for tests: torch's own build for CUDA over a library that is CUDA's runtime and driver on the host's memory.

    python -m tests.systems.cuda_on_host [pytest's arguments]      (`make system-cuda` sets up what it needs)

It shows what a plan, a recording, a graph or the allocator does; never how fast it is, nor what runs at once.
"""
