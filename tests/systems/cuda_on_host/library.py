"""The library that is CUDA on the host, and the environment that a process needs to run under it.

torch's build for CUDA is linked with a dozen of NVIDIA's libraries. Ours comes ahead of them (LD_PRELOAD), so that theirs need not be
there: of those that are missing, empty ones are made, and what torch wants of them and we do not have says that it failed.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent
# what libraries of NVIDIA's are called, and their functions
_LIBRARY = re.compile(r"lib(cu|nccl|nvshmem|nvrtc|nvJitLink|nvToolsExt|cupti)\w*\.so\.\d+")
_FUNCTION = re.compile(
    r"_*(cuda|cublas|cudnn|cufft|cusparse|cusolver|curand|cufile|cuFile|cupti|nccl|nvshmem|nvrtc|nvtx|nvJitLink|cu[A-Z])")
# what is not a status: a text, a version
_TEXTS = re.compile(r"Get\w*(String|Name)$")
_VERSIONS = {"cudnnGetVersion": 91900, "cudnnGetCudartVersion": 13000}


def build(where: Path) -> dict[str, str]:
    """Make it there; the environment of processes under it."""
    where.mkdir(parents=True, exist_ok=True)
    torch_libraries = sorted((package("torch") / "lib").glob("*.so*"))
    ours = where / "ours.o"
    _run("g++", "-O1", "-std=c++17", "-fPIC", "-r", "-nostdlib", "-o", ours, *sorted(SOURCES.glob("*.cpp")), *_includes())
    rest = where / "rest.s"
    rest.write_text(_functions(_symbols("--undefined-only", *torch_libraries) - _symbols("--defined-only", ours, dynamic=False)))
    library = where / "libcuda.so.1"
    _run("g++", "-shared", "-fPIC", "-o", library, ours, rest, "-ldl")
    wanted: dict[str, set[str]] = {}
    for path in torch_libraries:
        for name, versions in _needed(path).items():
            if _LIBRARY.fullmatch(name) and name != library.name:
                wanted.setdefault(name, set()).update(versions)
    for name, versions in wanted.items():
        script = where / f"{name}.map"
        script.write_text("".join(f"{version} {{ *; }};\n" for version in versions) or "{ *; };\n")
        named = f"-Wl,-soname,{name}", f"-Wl,--version-script={script}"
        _run("gcc", "-shared", "-nostdlib", *named, "-o", where / name, "-x", "c", os.devnull)
    return {
        "LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(where), "TRITON_LIBCUDA_PATH": str(where), "TRITON_INTERPRET": "1",
        "PYTORCH_NVML_BASED_CUDA_CHECK": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }  # fmt: skip


def _includes() -> list[str]:
    """The headers of torch's CUDA; Triton has those that are missing there."""
    nvidia = next(Path(p) for p in importlib.util.find_spec("nvidia").submodule_search_locations)  # type: ignore[union-attr]
    return [f"-I{nvidia / 'cu13' / 'include'}", f"-I{package('triton') / 'backends' / 'nvidia' / 'include'}"]


def package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    assert found is not None and found.origin is not None, f"{name} is not installed"
    return Path(found.origin).parent


def _functions(names: set[str]) -> str:
    """Assembly. A status that is no success; a text for those that return one."""
    lines = ['.section .rodata', 'not_here: .asciz "this function is not there where CUDA is on the host"', ".text"]
    for name in sorted(n for n in names if _FUNCTION.match(n)):
        value = "lea not_here(%rip), %rax" if _TEXTS.search(name) else f"mov ${_VERSIONS.get(name, 1)}, %eax"
        lines += [f".globl {name}", f".type {name}, @function", f"{name}: {value}", "ret"]
    return "\n".join([*lines, '.section .note.GNU-stack,"",@progbits', ""])


def _symbols(which: str, *paths: Path, dynamic: bool = True) -> set[str]:
    listed = _run("nm", *(["-D"] if dynamic else []), which, *paths)
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if len(line.split()) > 1}


def _needed(path: Path) -> dict[str, set[str]]:
    """The libraries that one is linked with, and the versions that it wants of them."""
    found: dict[str, set[str]] = {name: set() for name in re.findall(r"\(NEEDED\).*\[(.+)\]", _run("readelf", "-d", path))}
    name = ""
    for library, version in re.findall(r"File: (\S+)|Name: (\S+)  Flags", _run("readelf", "-W", "-V", path)):
        name = library or name
        if version:
            found.setdefault(name, set()).add(version)
    return found


def _run(*command: object) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stderr}"
    return done.stdout
