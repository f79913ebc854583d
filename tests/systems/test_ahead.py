"""benchmarks.ahead: what is compiled without a GPU is found by another process, and what nobody computed is looked at by none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ahead import child, host, kept
from benchmarks.ahead.__main__ import is_warm

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not host.is_under_it(), reason="make system-ahead runs it under CUDA on the host")


def _run(caches: Path, *command: str) -> subprocess.CompletedProcess[str]:
    caches.mkdir(exist_ok=True)
    run = [sys.executable, "-W", "ignore", *command]
    return subprocess.run(run, cwd=ROOT, env=os.environ | host.places(caches), capture_output=True, text=True)


def _compile(caches: Path, **wish: object) -> dict:
    wish = {"suite": "branches", "tiny": True, "variants": []} | wish
    done = _run(caches, "-m", "benchmarks.ahead", "--child", json.dumps(wish))
    assert done.stdout, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_another_process_compiles_nothing(tmp_path: Path) -> None:
    cold = _compile(tmp_path / "here", row="resnet50 b=1")
    assert not cold["missing"] and cold["kernels compiled"] and cold["graphs"]["miss"] and not is_warm(cold)
    kept.pack([tmp_path / "here"], tmp_path / "out", tmp_path / "there")
    kept.unpack(tmp_path / "out", tmp_path / "there")
    warm = _compile(tmp_path / "there", row="resnet50 b=1")
    assert is_warm(warm)


PROGRAM = """
import torch
from benchmarks.ahead import nothing
nothing.install()
{0}
"""


@pytest.mark.parametrize("line, says", [
    ("torch.full([4], 3.0, device='cuda').sum().item() == 12.0 or exit(5)", ""),
    ("bool((torch.arange(10, device='cuda') < 10).all()) or exit(5)", ""),
    ("torch.ones(1 << 20, device='cuda').sum().item()", "Unknown"),
    ("x = torch.ones(1 << 20, device='cuda'); (x[:4] * 2).tolist()", "Unknown"),
    ("x = torch.ones(1 << 20, device='cuda'); x[:4].fill_(1); x[:4].cpu()", "Unknown"),
    ("torch.nn.functional.conv2d(*(torch.ones(1, 1, 3, 3, device='cuda'),) * 2).item()", "Unknown"),
])  # fmt: skip
def test_what_nobody_computed_is_not_looked_at(tmp_path: Path, line: str, says: str) -> None:
    done = _run(tmp_path / "caches", "-c", PROGRAM.format(line))
    assert (done.returncode == 0) is (not says) and says in done.stderr, done.stderr[-2000:]


LAYER = """
layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.LayerNorm(64)).to("cuda", torch.bfloat16)
with torch.no_grad(): torch.compile(layer)(torch.ones(32, 64, device="cuda", dtype=torch.bfloat16))
counters = torch._dynamo.utils.counters
print(nothing.num_compiled(), counters["aot_autograd"].get("autograd_cache_hit"), counters["inductor"].get("fxgraph_cache_hit"))
"""


def test_nothing_is_traced_anew_where_nothing_was_to_be_measured(tmp_path: Path) -> None:
    cold = _run(tmp_path / "here", "-c", PROGRAM.format(LAYER)).stdout.split()
    kept.pack([tmp_path / "here"], tmp_path / "out", tmp_path / "there")
    kept.unpack(tmp_path / "out", tmp_path / "there")
    warm = _run(tmp_path / "there", "-c", PROGRAM.format(LAYER)).stdout.split()
    assert int(cold[0]) > 0 and cold[1:] == ["None", "None"] and warm == ["0", "1", "1"]


CHOICE = """
@torch.compile
def product(x, y): return torch.nn.functional.relu(x @ y)
with torch.no_grad(): product(*(torch.ones(513, 513, device="cuda", dtype=torch.bfloat16),) * 2)
print(nothing.choices, torch._dynamo.utils.counters["aot_autograd"])
"""


def test_what_a_gpu_would_measure_is_not_kept_by_what_goes_ahead_of_it(tmp_path: Path) -> None:
    done = _run(tmp_path / "caches", "-c", PROGRAM.format(CHOICE))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "aten.mm (513, 513) (513, 513)" in done.stdout and "autograd_cache_saved" not in done.stdout
    inductor = tmp_path / "caches" / "inductor"
    assert list(inductor.glob("fxgraph/*/*/*")) and not [path for path in inductor.glob("aotautograd/**/*") if path.is_file()]


TUNED = """
product = torch.compile(lambda x, y: torch.nn.functional.relu(x @ y), mode="max-autotune-no-cudagraphs")
with torch.no_grad(): product(*(torch.ones(256, 256, device="cuda", dtype=torch.bfloat16),) * 2)
print(nothing.num_compiled(), len(nothing.choices["algorithm"]))
"""


def test_of_max_autotune_the_candidates_are_kept_and_no_choice(tmp_path: Path) -> None:
    cold = [int(n) for n in _run(tmp_path / "here", "-c", PROGRAM.format(TUNED)).stdout.split()[-2:]]
    assert min(cold) > 0
    kept.pack([tmp_path / "here"], tmp_path / "out", tmp_path / "there")
    kept.unpack(tmp_path / "out", tmp_path / "there")
    assert {path.name for path in (tmp_path / "there").iterdir()} == {"triton"}
    warm = [int(n) for n in _run(tmp_path / "there", "-c", PROGRAM.format(TUNED)).stdout.split()[-2:]]
    assert warm[0] == 0 and warm[1] > 0


@pytest.mark.parametrize("suite, row", [
    ("overlap", "flux ulysses8 1024px b=2"), ("backend", "llama decode b=16"),
    ("systems", "lora trainer step 512 tokens"), ("systems", "sd3 1024 tokens"),
])  # fmt: skip
def test_all_variants_of_a_row_are_compiled(tmp_path: Path, suite: str, row: str) -> None:
    """Parts, several streams, an emulated network, a Trainer's steps, a pipeline: nothing of a row is missing."""
    assert row in child.rows(suite, "*")
    found = _compile(tmp_path / "here", suite=suite, row=row)
    assert not found["missing"] and found["kernels compiled"] and found["graphs"]["miss"] > 1


def test_rows_of_each_suite() -> None:
    found = {suite: child.rows(suite, "l*prefill*,hrnet_w18 b=1") for suite in child.SUITES}
    assert all(found.values()) and found["branches"] == ["hrnet_w18 b=1"]
    with pytest.raises(SystemExit, match="branches, backend, overlap, systems"):
        child.rows("vllm_serving", "*")
