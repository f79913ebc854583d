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
import sysconfig
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger("dynaflow")

SOURCE = Path(__file__).with_suffix(".c")
# what a compiler may take
TIME_LIMIT_S = 30

_Int, _Pointer = ctypes.c_int64, ctypes.c_void_p


# torch's functions that say one number of a tensor: dtype, kind of device, number of device
_FACTS = ("aoti_torch_get_dtype", "aoti_torch_get_device_type", "aoti_torch_get_device_index")


# what is where: see `struct torch` in native.c
_OFFSETS = ("type", "count", "list", "tuple", "flag", "tensor", "storage", "offset", "data", "bytes")


class Torch(ctypes.Structure):
    _fields_ = [*((name, _Pointer) for name in ("address", "num_dims", "sizes", "strides")), ("facts", _Pointer * 3),
                ("list", _Pointer), ("tuple", _Pointer), *((f"{name}_at", _Int) for name in _OFFSETS)]  # fmt: skip


class Argument(ctypes.Structure):
    _fields_ = [("number", _Int), ("type", _Pointer), ("num_dims", _Int), ("lie", _Pointer), ("facts", ctypes.c_int32 * 3)]


class Place(ctypes.Structure):
    _fields_ = [("number", _Int), ("type", _Pointer), ("data", _Pointer), ("offset", _Int)]


class Word(ctypes.Structure):
    _fields_ = [("at", _Pointer), ("value", _Int)]


class Table(ctypes.Structure):
    """`struct words`, `struct feeds`."""

    _fields_ = [("each", _Pointer), ("count", _Int)]


class Range(ctypes.Structure):
    _fields_ = [("begin", _Pointer), ("end", _Pointer)]


class Fit(ctypes.Structure):
    _fields_ = [("torch", _Pointer), ("num_copied", _Int), ("num_changed", _Int), ("num_bound", _Int), ("copied", _Pointer),
                ("changed", _Pointer), ("bound", _Pointer), ("addresses", _Pointer)]  # fmt: skip


class Feed(ctypes.Structure):
    _fields_ = [("torch", _Pointer), ("argument", Argument), ("alignment", ctypes.c_uint64), ("source", _Pointer), ("set", _Pointer),
                ("graph", _Pointer), ("node", _Pointer), ("params", _Pointer)]  # fmt: skip


class Stream(ctypes.Structure):
    _fields_ = [("current", _Pointer), ("is_capturing", _Pointer), ("device", _Int), ("last", _Pointer)]


class Ready(ctypes.Structure):
    _fields_ = [("stream", _Pointer), ("words", _Pointer), ("fit", _Pointer), ("feeds", _Pointer)]


# numbers of native.c's methods
_FITS, _HOLD, _FEED, _LOOK = range(4)


class Native:
    """The functions, and what they are told of this process."""

    def __init__(self, library: ctypes.PyDLL, facts: Torch, counts: tuple[int, int]):
        """`counts`: where Python's objects, and torch's, count who refers to them."""
        self.facts, (self.by_python_at, self.by_torch_at) = facts, counts
        self._method: Any = library.method_over
        self._method.argtypes, self._method.restype = [_Int, _Pointer], ctypes.py_object
        # how many are fed, from the one of this number on
        self.feed: Any = library.feed
        self.feed.argtypes, self.feed.restype = [ctypes.py_object, _Pointer, _Int], _Int

    def fits(self, facts: Fit) -> Callable[[Sequence[Any]], bool]:
        """Whether arguments are where they were. Who calls what this and the next return keeps the facts alive."""
        return self._method(_FITS, ctypes.addressof(facts))  # type: ignore[no-any-return]

    def hold(self, words: Table) -> Callable[[], bool]:
        """Whether words are what they were."""
        return self._method(_HOLD, ctypes.addressof(words))  # type: ignore[no-any-return]

    def fed(self, feeds: Table) -> Callable[[Sequence[Any]], int]:
        """How many copies read from these arguments from now on."""
        return self._method(_FEED, ctypes.addressof(feeds))  # type: ignore[no-any-return]

    def look(self, facts: Ready) -> Callable[[Sequence[Any]], int]:
        """Whether a recording can be launched for these arguments as it was the last time: see `look` in native.c."""
        return self._method(_LOOK, ctypes.addressof(facts))  # type: ignore[no-any-return]


class FitCheck:
    """Whether arguments are where they were: see `fits` in native.c. It keeps none of them."""

    def __init__(
        self, native: Native, args: Sequence[Any], copied: Sequence[int], changed: Sequence[tuple[int, int]], bound: Sequence[int],
        written: Sequence[int] = (),
    ):
        """`changed`: where memory that is changed begins and ends. `written`: arguments of which torch is to say where they are: a storage
        that is shared until somebody writes to it moves then."""
        tables: tuple[ctypes.Array[Any], ...] = (
            (Argument * len(copied))(*[describe(args[i], i, has_lie=False) for i in copied]),
            (Range * len(changed))(*[Range(*each) for each in changed]),
            (Place * len(bound))(*[_place(args[i], i, i not in written) for i in bound]),
            (_Pointer * len(bound))(*[args[i].data_ptr() for i in bound]),
        )
        self.facts = Fit(ctypes.addressof(native.facts), len(copied), len(changed), len(bound), *[ctypes.addressof(t) for t in tables])
        # C knows a class by its address: it must not be another's
        self._kept = (tables, [type(args[i]) for i in (*copied, *bound)])
        self.native, self.function = native, native.fits(self.facts)

    def __call__(self, args: Sequence[Any]) -> bool:
        return self.function(args)


def _place(arg: torch.Tensor, number: int, is_read: bool) -> Place:
    storage = arg.untyped_storage()
    data = storage.data_ptr() if arg.data_ptr() and is_read else 0
    fills = arg.layout == torch.strided and arg.numel() and _extent(arg) == storage.nbytes()
    return Place(number, id(type(arg)), data, -1 - storage.nbytes() if fills else arg.storage_offset())


def _extent(arg: torch.Tensor) -> int:
    """Bytes from its first element to behind its last."""
    return (1 + sum((size - 1) * step for size, step in zip(arg.shape, arg.stride()))) * arg.itemsize


class Words:
    """What stands at addresses that stay what they are: whether it is still what it was."""

    def __init__(self, native: Native, words: Sequence[tuple[int, int]] = ()):
        self.facts = Table()
        self.native, self.hold = native, native.hold(self.facts)
        self.watch(words)

    def watch(self, words: Sequence[tuple[int, int]]) -> None:
        """These addresses from now on, and what is to stand there."""
        self._words = (Word * len(words))(*[Word(*word) for word in words])
        self.facts.each, self.facts.count = ctypes.addressof(self._words), len(words)


def word_at(address: int) -> int:
    return _Int.from_address(address).value


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


def native() -> Native | None:
    """None where it cannot be had. The same for all that ask, and for good."""
    with _making:
        return _made()


_making = threading.Lock()


@cache
def _made() -> Native | None:
    try:
        with _disable_current_modes(), torch.inference_mode(False):
            made = Native(_compiled(), _facts(), _counts())
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
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise OSError("objects of this build of Python are counted by several threads at once")
    names = ["aoti_torch_get_data_ptr", "aoti_torch_get_dim", "aoti_torch_get_sizes", "aoti_torch_get_strides", *_FACTS]
    pointers = [ctypes.cast(getattr(_library(), name), _Pointer) for name in names]
    found = _offsets()
    return Torch(*pointers[:4], (_Pointer * 3)(*pointers[4:]), id(list), id(tuple), *[found[name] for name in _OFFSETS])


def _samples() -> list[torch.Tensor]:
    def make(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="cpu", dtype=torch.float32)

    return [make(3), torch.nn.Parameter(make(2, 5)), make(4, 3).t(), make(7)[2:], make(0), make(99)[37:], torch.nn.Parameter(make(88)[53:])]


def _where(objects: Sequence[int], words: Sequence[int], end: int) -> int:
    """The offset at which each of these objects has its word."""
    for at in range(8, end, 8):
        if all((_Int.from_address(each + at).value) == word for each, word in zip(objects, words)):
            return at
    raise OSError("objects of this build of Python or torch are laid out otherwise")


def _offsets() -> dict[str, int]:
    tensors = _samples()
    # nobody's own memory: what frees it is not what it is
    lent = torch._C._construct_storage_from_data_pointer(tensors[0].data_ptr(), torch.device("cpu"), 8)
    storages: list[Any] = [*(t.untyped_storage() for t in tensors), lent]
    lists, tuples = [[t, *tensors] for t in tensors], [(t, *tensors[1:]) for t in tensors]
    objects, inner, own = [id(t) for t in tensors], [t._cdata for t in tensors], [s._cdata for s in storages]
    type_at, tensor_at = _where(objects, [id(type(t)) for t in tensors], 64), _where(objects, inner, 64)
    count_at = _where([*map(id, lists), *map(id, tuples)], [len(each) for each in (*lists, *tuples)], 40)
    return {
        "type": type_at, "tensor": tensor_at, "flag": _flag(objects, type_at, tensor_at), "count": count_at,
        "list": count_at + 8, "tuple": _where([id(t) for t in tuples], objects, 40),
        "storage": _where(inner, own[:-1], 64), "offset": _where(inner, [int(t.storage_offset()) for t in tensors], 176),
        "data": _where(own, [s.data_ptr() for s in storages], 64), "bytes": _where(own, [s.nbytes() for s in storages], 96),
    }  # fmt: skip


def _counts() -> tuple[int, int]:
    tensor = _samples()[0]
    storage = tensor.untyped_storage()
    objects, inner = [id(tensor), id(storage)], [tensor._cdata, storage._cdata]
    before = [[_Int.from_address(each + at).value for at in range(0, 24, 8)] for each in (*objects, *inner)]
    held = (tensor, storage, tensor.view(3))  # a view refers to both
    after = [[_Int.from_address(each + at).value for at in range(0, 24, 8)] for each in (*objects, *inner)]
    changed = [[8 * i for i, (a, b) in enumerate(zip(*words)) if a != b] for words in zip(before, after)]
    del held
    if changed[0] != changed[1] or changed[2] != changed[3] or any(len(each) != 1 for each in changed):
        raise OSError("objects of this build of Python or torch are counted otherwise")
    return changed[0][0], changed[2][0]


def _flag(objects: Sequence[int], type_at: int, tensor_at: int) -> int:
    """Where a tensor's object says that its tensor is not its own, or -1."""
    at = tensor_at - 8
    if at <= type_at:
        return -1
    if any(ctypes.c_char.from_address(each + at).value != b"\0" for each in objects):
        raise OSError("tensors of this build of torch are laid out otherwise")
    return at


def _is_wrong(made: Native) -> str:
    """Why it cannot be used: it is tried out on tensors of which everything is known."""
    args: list[Any] = [*_samples(), *_samples()]
    bound = range(len(args))
    memory = [(args[0].data_ptr(), args[0].data_ptr() + args[0].untyped_storage().nbytes())]
    fits = FitCheck(made, args, [], [], bound)
    moved = [[*args[:i], torch.ones_like(args[i]) if args[i].numel() else args[0], *args[i + 1 :]] for i in bound]
    apart, inside = (FitCheck(made, [x], [0], memory, [])([x]) for x in (args[1], args[0][1:]))
    if not fits(args) or not fits(tuple(args)) or any(map(fits, moved)) or not apart or inside or any(_moves_unseen(made, x) for x in args):
        return "native.c and torch do not agree on where tensors are"
    return "native.c and torch do not agree on how tensors lie" if any(_lies_wrong(made, x) for x in _samples()) else ""


def _moves_unseen(made: Native, x: torch.Tensor) -> bool:
    """Whether `fits` does not see that a tensor's memory is another part of the same, or another, and then what it was again."""
    count = x.numel()
    if not count:
        return False
    x = torch.nn.Parameter(x.detach()) if type(x) is torch.nn.Parameter else x.detach()
    larger = torch.empty(2 * count, device="cpu", dtype=torch.float32)
    x.data = larger[:count]
    fits, seen = FitCheck(made, [x], [], [], [0]), []
    for data in (larger[count:], torch.empty(count, device="cpu", dtype=torch.float32), larger[:count]):
        x.data = data
        seen.append(fits((x,)))
    return seen != [False, False, True]


def _lies_wrong(made: Native, x: torch.Tensor) -> bool:
    """Whether `feed` takes what lies otherwise than x, or is of another kind, or does not take what lies like it."""
    source, done = ctypes.c_uint64(), ctypes.CFUNCTYPE(ctypes.c_int, *[_Pointer] * 3)(lambda *_: 0)
    argument = describe(x, 0)
    feed = Feed(ctypes.addressof(made.facts), argument, 1, ctypes.addressof(source), ctypes.cast(done, _Pointer), None, None, None)
    feeds = Table(ctypes.addressof(feed), 1)
    fed = made.fed(feeds)

    def takes(arg: torch.Tensor) -> bool:
        given: torch.Tensor = torch.nn.Parameter(arg) if type(x) is torch.nn.Parameter else arg
        return fed([given]) == 1 and source.value == given.data_ptr()

    like = torch.empty_strided(x.shape, x.stride(), device="cpu", dtype=torch.float32)
    others = [like.double(), like.unsqueeze(0), torch.empty([n + 1 for n in x.shape], device="cpu", dtype=torch.float32)]
    if like.dim() == 2:
        others.append(torch.empty_strided(x.shape, x.stride()[::-1], device="cpu", dtype=torch.float32))
    return not takes(like) or any(map(takes, others))
