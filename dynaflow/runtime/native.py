"""`native.c`, compiled where it runs: what would take Python microseconds on every call of a recording.

Wherever it cannot be had (no C compiler, another layout of objects than the one that is looked for), `native()` is None, and torch's own
functions do the same, slower.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, Sequence

import torch

from dynaflow import disk

log = logging.getLogger("dynaflow")

SOURCE = Path(__file__).with_suffix(".c")
# what a compiler may take
TIME_LIMIT_S = 30

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


class Torch(ctypes.Structure):
    _fields_ = [*((name, _Pointer) for name in ("item", "address", "sizes", "strides")),
                *((name, _Int) for name in ("type_at", "flag_at", "tensor_at"))]  # fmt: skip


class Argument(ctypes.Structure):
    _fields_ = [("number", _Int), ("type", _Pointer), ("num_dims", _Int), ("lie", _Pointer)]


class Range(ctypes.Structure):
    _fields_ = [("begin", _Pointer), ("end", _Pointer)]


class Fit(ctypes.Structure):
    _fields_ = [("torch", _Pointer), ("num_copied", _Int), ("num_changed", _Int), ("num_bound", _Int), ("copied", _Pointer),
                ("changed", _Pointer), ("bound", _Pointer), ("addresses", _Pointer)]  # fmt: skip


class Feed(ctypes.Structure):
    _fields_ = [("torch", _Pointer), ("argument", Argument), ("alignment", ctypes.c_uint64), ("source", _Pointer), ("set", _Pointer),
                ("graph", _Pointer), ("node", _Pointer), ("params", _Pointer)]  # fmt: skip


class Native:
    """The functions, and what they are told of this process."""

    def __init__(self, library: ctypes.PyDLL, facts: Torch):
        self.facts = facts
        self.fit: Any = library.fit
        self.fit.argtypes = [ctypes.py_object, _Pointer]
        self.feed: Any = library.feed
        self.feed.argtypes, self.feed.restype = [ctypes.py_object, _Pointer, _Int, _Int], _Int


class FitCheck:
    """Whether arguments are where they were: see `fit` in native.c. It keeps none of them."""

    def __init__(
        self, native: Native, args: Sequence[Any], copied: Sequence[int], changed: Sequence[tuple[int, int]], bound: Sequence[int]
    ):
        """`changed`: where memory that is changed begins and ends."""
        self.function = native.fit
        tables: tuple[ctypes.Array[Any], ...] = (
            (Argument * len(copied))(*[describe(args[i], i, has_lie=False) for i in copied]),
            (Range * len(changed))(*[Range(*each) for each in changed]),
            (Argument * len(bound))(*[describe(args[i], i, has_lie=False) for i in bound]),
            (_Pointer * len(bound))(*[args[i].data_ptr() for i in bound]),
        )
        facts = Fit(ctypes.addressof(native.facts), len(copied), len(changed), len(bound), *[ctypes.addressof(t) for t in tables])
        self._kept = (native, tables, facts)
        self.facts = ctypes.addressof(facts)

    def __call__(self, args: list[Any]) -> bool:
        return not self.function(args, self.facts)


def describe(arg: torch.Tensor, number: int, has_lie: bool = True) -> Argument:
    """An argument as it is; with `has_lie`, any other must lie like it. Sizes and strides live as long as the description."""
    if not has_lie:
        return Argument(number, id(type(arg)), -1, None)
    lie = (_Int * (2 * arg.dim()))(*arg.shape, *arg.stride())
    found = Argument(number, id(type(arg)), arg.dim(), ctypes.addressof(lie))
    found.kept = lie  # type: ignore[attr-defined]
    return found


@cache
def native() -> Native | None:
    try:
        facts = _facts()
        made = Native(ctypes.PyDLL(str(_compiled())), facts)
        if why := _is_wrong(made):
            raise OSError(why)
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        log.info("calls of recordings are looked through in Python: %s", error)
        return None
    return made


def _compiled() -> Path:
    source = SOURCE.read_bytes()
    path = disk.directory("native") / f"{hashlib.sha256(source).hexdigest()[:16]}-{os.uname().machine}.so"
    if not path.exists():
        compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")))), None)
        if compiler is None:
            raise OSError("there is no C compiler")
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE)],
                           check=True, capture_output=True, timeout=TIME_LIMIT_S)  # fmt: skip
            os.replace(made, path)
    if path.stat().st_uid != os.getuid():
        raise OSError(f"{path} is somebody else's")
    return path


def _facts() -> Torch:
    if sys.implementation.name != "cpython":
        raise OSError(f"objects of {sys.implementation.name} are not known")
    library = ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"))
    functions = [library.aoti_torch_get_data_ptr, library.aoti_torch_get_sizes, library.aoti_torch_get_strides]
    pointers = [ctypes.cast(f, _Pointer) for f in (ctypes.pythonapi.PyList_GetItem, *functions)]
    return Torch(*pointers, _offset(type), *_tensor_offset())


def _samples() -> list[torch.Tensor]:
    return [torch.empty(3), torch.nn.Parameter(torch.empty(2, 5)), torch.empty(4, 3).t(), torch.empty(7)[2:], torch.empty(0)]


def _offset(value_of: Any) -> int:
    """Where in their Python objects all sample tensors have the word that this function gives for each."""
    samples = _samples()
    for at in range(8, 64, 8):
        if all(_Pointer.from_address(id(t) + at).value == (id(type(t)) if value_of is type else value_of(t)) for t in samples):
            return at
    raise OSError("tensors of this build of torch are laid out otherwise")


def _tensor_offset() -> tuple[int, int]:
    """(where an object says that its tensor is not its own, or -1; where it has its tensor)"""
    at = _offset(lambda t: t._cdata)
    before = at - 8
    if before <= _offset(type):
        return -1, at
    if any(ctypes.c_char.from_address(id(t) + before).value != b"\0" for t in _samples()):
        raise OSError("tensors of this build of torch are laid out otherwise")
    return before, at


def _is_wrong(made: Native) -> str:
    """Why it cannot be used: it is tried out on tensors of which everything is known."""
    args: list[Any] = [*_samples(), torch.empty(64)]
    changed, bound = args[-1], range(len(args) - 1)
    memory = [(changed.data_ptr(), changed.data_ptr() + 256)]
    fits = FitCheck(made, args, [], memory, bound)
    moved = [[*args[:i], torch.empty_like(args[i]) if args[i].numel() else torch.empty(1), *args[i + 1 :]] for i in bound]
    apart, inside = (FitCheck(made, [x], [0], memory, [])([x]) for x in (torch.empty(3), changed[5:7]))
    if not fits(args) or any(map(fits, moved)) or not apart or inside:
        return "native.c and torch do not agree on where tensors are"
    return ""
