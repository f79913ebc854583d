"""A recorder for the CPU that behaves as CUDA's does: what is issued while it records is written down with its memory, and not done."""

from __future__ import annotations

from typing import Any, Callable
from weakref import WeakSet

import torch
from torch.utils._python_dispatch import TorchDispatchMode

REFUSAL = "operation not permitted when stream is capturing"


class _Writing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Callable[[], Any]] = []
        # what was allocated: memory of the pool
        self.made: WeakSet[torch.Tensor] = WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(REFUSAL)
        schema = func._schema
        written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        if written:
            self.pieces.append(lambda: func(*args, **kwargs))
            named = {**dict(zip((a.name for a in schema.arguments), args)), **kwargs}
            of = {frozenset(a.alias_info.before_set): named[a.name] for a in schema.arguments if a.alias_info is not None}
            results = [of[frozenset(r.alias_info.before_set)] for r in schema.returns]
            return results[0] if len(results) == 1 else tuple(results) or None
        result = func(*args, **kwargs)
        made = [r for r in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(r, torch.Tensor)]
        is_view = any(r.alias_info is not None for r in schema.returns)
        if not is_view:
            self.made.update(made)
        if is_view or func.__name__.startswith(("empty", "new_empty")):
            return result

        def again() -> None:
            new = func(*args, **kwargs)
            for mine, its in zip(made, new if isinstance(new, (tuple, list)) else [new]):
                mine.copy_(its)

        self.pieces.append(again)
        for tensor in made:  # nothing has run: whoever looks at it now sees that
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        return result


class Body:
    """One output; what it is given is not looked at."""

    changed = promised = saved = copied = ()
    allocates = has_products = False

    def __call__(self, given: Any, between: Any, outputs: Any) -> Any:
        return outputs

    def prepare(self) -> None:
        pass

    def make_outputs(self) -> list[torch.Tensor]:
        return [torch.empty(4)]

    def has_steps(self) -> bool:
        return False


class FakeRecorder:
    # whether something records now
    is_recording = False
    # per recording: what it allocated
    pool: list[WeakSet[torch.Tensor]] = []

    def __init__(self, log: list[str] | None = None):
        self.log: list[str] = [] if log is None else log
        self._num_pieces = 0

    @property
    def _is_in_pieces(self) -> bool:
        return self._num_pieces > 1

    def begin(self) -> None:
        self.log.append("begin")
        self._num_pieces += 1
        self._mode = _Writing()
        self._mode.__enter__()
        FakeRecorder.is_recording = True

    def end(self) -> Callable[[], Any]:
        self.log.append("end")
        self._leave()
        pieces, mine = self._mode.pieces, self._mode.made
        FakeRecorder.pool.append(mine)

        def replay() -> None:
            self.log.append("replay")
            # The pool is shared: what others allocated there while they were recorded is ours to overwrite. A piece of the same
            # recording may come before this one, and what it made is needed: that is only known to be so while it is recorded.
            if not FakeRecorder.is_recording and not self._is_in_pieces:
                for other in FakeRecorder.pool:
                    for tensor in () if other is mine else list(other):
                        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            for piece in pieces:
                piece()

        return replay

    def abort(self) -> None:
        self.log.append("abort")
        self._leave()

    def _leave(self) -> None:
        if FakeRecorder.is_recording:
            FakeRecorder.is_recording = False
            self._mode.__exit__(None, None, None)
