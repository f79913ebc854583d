"""For programs that are no tests: each Python process that is started under the library, with this folder in PYTHONPATH, computes what it
launches. What nobody computed, and what a kernel raised, is written to the file that CUDA_ON_HOST_FAILURES names."""

import os

if "libcuda.so.1" in os.environ.get("LD_PRELOAD", "") and "CUDA_ON_HOST_FAILURES" in os.environ:
    import atexit
    import itertools
    import sys
    from pathlib import Path

    from dynaflow.testing import hold
    from tests.systems.cuda_on_host import kernels

    kernels.install()
    hold.globaltimer, hold.smid = kernels.clock(itertools.count(0, 1000)), lambda: 7

    def tell() -> None:
        found = [*filter(None, [kernels.not_computed()]), *kernels.failures]
        if found:
            with Path(os.environ["CUDA_ON_HOST_FAILURES"]).open("a") as file:
                file.write(f"== {' '.join(sys.orig_argv)[:300]}\n{found[0]}\n({len(found)} in all)\n")

    atexit.register(tell)
