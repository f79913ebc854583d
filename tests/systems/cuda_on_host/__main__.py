"""pytest under the library; beside test_cuda.py with the tests of tests/gpu that can pass there, unless arguments name others of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.systems.cuda_on_host.library import build

ROOT = Path(__file__).parents[3]
TESTS = [f"tests/gpu/test_{name}" for name in (
    "backend.py", "in_captures.py", "strategies.py::test_results", "engine.py", "kernels.py", "programs.py")]  # fmt: skip
# tests that ask what nobody but a device knows, and some that take minutes here
LEFT_OUT = {
    "test_engine.py::test_streams_with_a_share_run_on_disjoint_sms": "on which SMs a kernel of CUDA C runs",
    "test_engine.py::test_an_emulated_collective_is_hidden_behind_compute": "what runs at once",
    "test_engine.py::test_recorded_plans_are_bit_equal_over_many_replays": "two hundred replays; test_backend.py has fewer",
    "test_kernels.py::test_kernels_run_side_by_side": "what runs at once",
    "test_kernels.py::test_costs_tell_small_kernels_from_large_ones": "how long a kernel takes",
    "test_kernels.py::test_the_budget_holds": "images that are large for an interpreter",
    "test_kernels.py::test_auto_chooses_and_says_why[branchy]": "a dozen plans of convolutions; [adapted] is here",
    "test_kernels.py::test_streams_without_products_have_no_workspace[auto]": "a dozen plans of convolutions",
}


def main(args: list[str]) -> None:
    environment = build(ROOT / "build" / "cuda_on_host")
    tests = TESTS if any("test_cuda" in arg for arg in args) and not any("tests/gpu" in arg for arg in args) else []
    deselected = [f"--deselect=tests/gpu/{name}" for name in LEFT_OUT]
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-p", "tests.systems.cuda_on_host.kernels", *args, *tests, *deselected]
    os.execve(sys.executable, command, os.environ | environment | {"PYTHONPATH": str(ROOT)})


main(sys.argv[1:])
