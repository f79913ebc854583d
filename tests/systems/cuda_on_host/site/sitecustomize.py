"""For programs that are no tests: each Python process that is started under the library, with this folder in PYTHONPATH, computes what it
launches. What a kernel raised, and what nobody computed, is written to the file that CUDA_ON_HOST_FAILURES names."""

import os

if "libcuda.so.1" in os.environ.get("LD_PRELOAD", "") and "CUDA_ON_HOST_FAILURES" in os.environ:
    import atexit
    import itertools

    from dynaflow.testing import hold
    from tests.systems.cuda_on_host import kernels

    kernels.install()
    hold.globaltimer, hold.smid = kernels.clock(itertools.count(0, 1000)), lambda: 7

    @atexit.register
    def tell() -> None:
        if unknown := kernels.not_computed():
            kernels.fail(f"nobody computed {unknown}")
