"""What runs on a lent machine, here with suites that are cheap."""

import argparse
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions

import pytest

from benchmarks import lent


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(lent, "WORK", tmp_path / "work")

    def make(**options):
        args = {"out": tmp_path / "out", "bundles": None, "caches": [], "commit": "abc", "tests_limit_s": 60.0}
        return lent.Lent(argparse.Namespace(**args | options))

    return make


def test_suites_run_side_by_side_and_say_how_they_ended(machine, tmp_path, monkeypatch, capsys):
    package = tmp_path / "tree" / "benchmarks"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(lent.ROOT / "pyproject.toml", tmp_path / "tree")
    says = "import os, sys\nprint(sys.argv[1:], os.environ['DYNAFLOW_COMMIT'])\nopen(sys.argv[-1], 'w').write('{}')"
    (package / "good.py").write_text(says)
    (package / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(lent, "ROOT", tmp_path / "tree")
    here = machine()
    assert here.step("good --rows 'a b=*'")
    assert (tmp_path / "out" / "good-1.json").read_text() == "{}"
    assert "['--rows', 'a b=*', '--json'" in capsys.readouterr().out
    assert "abc" in (tmp_path / "out" / "good-1.log").read_text()
    assert not here.step("good & bad")
    told = capsys.readouterr().out
    assert "== good-2: rc 0" in told and "== bad-3: rc 3" in told


def test_plugins_are_found_though_nothing_is_installed(machine, tmp_path):
    machine()
    (mine,) = distributions(path=[str(tmp_path / "work" / "packages")])
    assert isinstance(mine, Distribution) and mine.metadata["Name"] == "dynaflow"
    found = {(point.group, point.value) for point in mine.entry_points}
    assert found == {("torch_dynamo_backends", "dynaflow.capture:backend"),
                     ("vllm.general_plugins", "dynaflow.integrations.vllm:register")}  # fmt: skip


def test_what_hangs_is_ended(machine, monkeypatch, capsys):
    here = machine()
    assert not here._run([("sleeper", ["-c", "import time; time.sleep(60)"], 0.5)])
    assert "sleeper: ended for want of time" in capsys.readouterr().out


def test_caches_come_back_in_the_next_call(machine, tmp_path, monkeypatch):
    here = machine()
    (here.caches / "inductor").mkdir()
    (here.caches / "inductor" / "kernel.py").write_text("compiled" * 1000)
    monkeypatch.setattr(lent, "PIECE", 64)
    assert here.step("caches")
    assert len(list((tmp_path / "out").glob("caches.*"))) > 1
    (here.caches / "inductor" / "kernel.py").rename(here.caches / "inductor" / "other.py")
    here.out = tmp_path / "second"
    here.out.mkdir()
    assert here.step("caches")
    monkeypatch.setattr(lent, "WORK", tmp_path / "another")
    again = machine(caches=[tmp_path / "out", tmp_path / "second"])
    assert {file.name for file in (again.caches / "inductor").iterdir()} == {"kernel.py", "other.py"}
    assert (again.caches / "inductor" / "kernel.py").read_text() == "compiled" * 1000


COMPILERS = [({"CXX": "/opt/tools/g++-14"}, "g++-14", "/opt/tools:/bin"), ({"CXX": "clang++"}, "clang++", "/bin"), ({}, "g++", "/bin")]


@pytest.mark.parametrize("given, name, path", COMPILERS)
def test_the_compiler_is_called_the_same_wherever_it_lies(given, name, path):
    assert lent.compiler_by_name({"PATH": "/bin", "HOME": "/h"} | given) == {"PATH": path, "CXX": name, "HOME": "/h"}


def test_a_step_that_must_go_well_stops_the_others(monkeypatch, tmp_path, capsys):
    done = []
    monkeypatch.setattr(lent, "WORK", tmp_path / "work")
    monkeypatch.setattr(lent.Lent, "step", lambda self, text: done.append(text) or text != "tests")
    for steps in (["tests", "a", "b"], ["tests!", "a"]):
        monkeypatch.setattr("sys.argv", ["lent", "--out", str(tmp_path / "out"), *steps])
        assert lent.main() == 1
    assert done == ["tests", "a", "b", "tests"] and "stopped behind tests!" in capsys.readouterr().out


def test_every_file_of_tests_is_run_once():
    groups = [*lent.side_by_side().values(), *lent.TIMED_TESTS.values(), *lent.ZOO.values()]
    files = [file for files in groups for file in files]
    assert sorted(files) == sorted(path.name for path in (lent.ROOT / "tests" / "gpu").glob("test_*.py"))


def test_it_is_there_without_torch():
    """benchmarks.ahead, which shares its folders, must not load torch before CUDA on the host."""
    done = subprocess.run([sys.executable, "-c", "import sys; sys.modules['torch'] = None; import benchmarks.ahead.__main__"],
                          cwd=lent.ROOT, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
