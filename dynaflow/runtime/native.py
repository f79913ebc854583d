"""`native.c`, compiled where it runs: what would take Python microseconds on every call of a recording.

Every process compiles its own, in a tenth of a second or less: a file that was left for the next one would have to be trusted. Where it
cannot be had (no C compiler, another layout of objects than the one that is looked for), `native()` is None, and torch's own functions do
the same, slower.
"""

from __future__ import annotations

import ctypes
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
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("dynaflow")

SOURCE = Path(__file__).with_suffix(".c")
# what a compiler may take
TIME_LIMIT_S = 30

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


# torch's functions that say one number of a tensor: dtype, kind of device, number of device
_FACTS = ("aoti_torch_get_dtype", "aoti_torch_get_device_type", "aoti_torch_get_device_index")


class Torch(ctypes.Structure):
    _fields_ = [*((name, _Pointer) for name in ("item", "address", "num_dims", "sizes", "strides")), ("facts", _Pointer * 3),
                *((name, _Int) for name in ("type_at", "flag_at", "tensor_at"))]  # fmt: skip


class Argument(ctypes.Structure):
    _fields_ = [("number", _Int), ("type", _Pointer), ("num_dims", _Int), ("lie", _Pointer), ("facts", ctypes.c_int32 * 3)]


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
        # C knows a class by its address: it must not be another's
        self._kept = (native, tables, facts, [type(args[i]) for i in (*copied, *bound)])
        self.facts = ctypes.addressof(facts)

    def __call__(self, args: list[Any]) -> bool:
        return not self.function(args, self.facts)


def describe(arg: torch.Tensor, number: int, has_lie: bool = True) -> Argument:
    """An argument as it is; with `has_lie`, any other must be of its kind and lie like it. Sizes and strides live as long as the
    description, the class as long as whoever asks keeps it."""
    if not has_lie:
        return Argument(number, id(type(arg)), -1, None)
    lie = (_Int * (2 * arg.dim()))(*arg.shape, *arg.stride())
    facts = (ctypes.c_int32 * 3)()
    tensor = _Pointer(arg._cdata)
    for i, name in enumerate(_FACTS):
        if getattr(_library(), name)(ctypes.byref(tensor), ctypes.byref(facts, 4 * i)):
            raise OSError(f"{name} failed")
    found = Argument(number, id(type(arg)), arg.dim(), ctypes.addressof(lie), facts)
    found.kept = lie  # type: ignore[attr-defined]
    return found


@cache
def native() -> Native | None:
    try:
        with _disable_current_modes():
            made = Native(_compiled(), _facts())
            if why := _is_wrong(made):
                raise OSError(why)
    except (OSError, AttributeError) as error:
        log.info("calls of recordings are looked through in Python: %s", error)
        return None
    return made


def _compiled() -> ctypes.PyDLL:
    wanted = filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))
    why = "there is no C compiler"
    for compiler in filter(None, map(shutil.which, wanted)):
        with tempfile.TemporaryDirectory() as folder:
            made = Path(folder) / "native.so"
            command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(made), str(SOURCE)]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=TIME_LIMIT_S)
                return ctypes.PyDLL(str(made))  # what is loaded needs its file no more
            except (OSError, subprocess.SubprocessError) as error:
                said = getattr(error, "stderr", None) or b""
                why = f"{error} {said.decode(errors='replace').strip()}".strip()
    raise OSError(why)


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(os.path.join(torch.__path__[0], "lib", "libtorch_cpu.so"))


def _facts() -> Torch:
    if sys.implementation.name != "cpython":
        raise OSError(f"objects of {sys.implementation.name} are not known")
    names = ["aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides", *_FACTS]
    functions = [ctypes.pythonapi.PyList_GetItem, *(getattr(_library(), name) for name in names)]
    pointers = [ctypes.cast(f, _Pointer) for f in functions]
    return Torch(*pointers[:5], (_Pointer * 3)(*pointers[5:]), _offset(type), *_tensor_offset())


def _samples() -> list[torch.Tensor]:
    def make(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cpu", dtype=torch.float32)

    return [make(3), torch.nn.Parameter(make(2, 5)), make(4, 3).t(), make(7)[2:], make(0)]


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
    args: list[Any] = [*_samples(), *_samples()]
    bound = range(len(args))
    memory = [(args[0].data_ptr(), args[0].data_ptr() + args[0].untyped_storage().nbytes())]
    fits = FitCheck(made, args, [], [], bound)
    moved = [[*args[:i], torch.ones_like(args[i]) if args[i].numel() else args[0], *args[i + 1 :]] for i in bound]
    apart, inside = (FitCheck(made, [x], [0], memory, [])([x]) for x in (args[1], args[0][1:]))
    if not fits(args) or any(map(fits, moved)) or not apart or inside:
        return "native.c and torch do not agree on where tensors are"
    return "native.c and torch do not agree on how tensors lie" if any(_lies_wrong(made, x) for x in _samples()) else ""


def _lies_wrong(made: Native, x: torch.Tensor) -> bool:
    """Whether `feed` takes what lies otherwise than x, or is of another kind, or does not take what lies like it."""
    source, done = ctypes.c_uint64(), ctypes.CFUNCTYPE(ctypes.c_int, *[_Pointer] * 3)(lambda *_: 0)
    argument = describe(x, 0)
    feed = Feed(ctypes.addressof(made.facts), argument, 1, ctypes.addressof(source), ctypes.cast(done, _Pointer), None, None, None)

    def takes(arg: torch.Tensor) -> bool:
        given: torch.Tensor = torch.nn.Parameter(arg) if type(x) is torch.nn.Parameter else arg
        return bool(made.feed([given], ctypes.addressof(feed), 0, 1)) and source.value == given.data_ptr()

    like = torch.empty_strided(x.shape, x.stride(), device="cpu", dtype=torch.float32)
    others = [like.double(), like.unsqueeze(0), torch.empty([n + 1 for n in x.shape], device="cpu", dtype=torch.float32)]
    if like.dim() == 2:
        others.append(torch.empty_strided(x.shape, x.stride()[::-1], device="cpu", dtype=torch.float32))
    return not takes(like) or any(map(takes, others))
