"""Parts with contexts of their own: each launch of a part runs inside its part's, under every runtime."""

import contextlib
from contextlib import contextmanager

import pytest
import torch

import dynaflow as df
from dynaflow import errors


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("runtime", ["threads", "serial", "fake"])  # serial: the generated function
def test_part_contexts(runtime):
    state = {"rows": None}

    @torch.library.custom_op("dynaflow_test::scaled", mutates_args=())
    def scaled(x: torch.Tensor) -> torch.Tensor:
        start, stop = state["rows"]
        assert x.shape[0] == stop - start
        return x * torch.arange(start, stop).unsqueeze(1)

    scaled.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.scaled, df.rowwise)

    @contextmanager
    def rows(start, stop):
        before, state["rows"] = state["rows"], (start, stop)
        yield
        state["rows"] = before

    def function(x):
        return torch.ops.dynaflow_test.scaled(x + 1) * 2

    fast = df.compile(function, strategy=df.NanoBatch(3), strict=True, runtime=runtime,
                      part_context=lambda parts: [rows(p.start, p.stop) for p in parts])  # fmt: skip
    for n in (7, 9):
        x = torch.randn(n, 2)
        state["rows"] = (0, n)
        torch.testing.assert_close(fast(x), function(x))
        assert state["rows"] == (0, n)
    short = df.compile(function, strategy=df.NanoBatch(3), part_context=lambda parts: [])
    with pytest.raises(errors.OptionError, match="0 context managers for 3 parts"):
        short(torch.randn(6, 2))


@pytest.mark.parametrize("runtime", ["threads", "serial", "fake"])
def test_a_part_context_cannot_swallow_an_error(runtime):
    class Replaced(df.Strategy):
        def schedule(self, flow):
            flow.split(2)
            while ready := flow.get_ready_ops():
                flow.execute(ready[0])

    @torch.library.custom_op("dynaflow_test::raises", mutates_args=())
    def raises(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("boom")

    raises.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.raises, df.rowwise)
    fast = df.compile(
        lambda x: torch.ops.dynaflow_test.raises(x) + 1, strategy=Replaced(), strict=True, runtime=runtime,
        part_context=lambda parts: [contextlib.suppress(RuntimeError) for _ in parts],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="boom"):
        fast(torch.randn(4, 3))


@pytest.mark.parametrize("runtime", ["threads", "serial"])
def test_the_launchs_own_error_is_the_one_to_know(runtime):
    """A part's context that fails on the way out is told beside it; without an error of the launch's, it is the error."""
    is_bad = [True]

    @torch.library.custom_op("dynaflow_test::may_raise", mutates_args=())
    def may_raise(x: torch.Tensor) -> torch.Tensor:
        if is_bad[0]:
            raise RuntimeError("boom")
        return x.clone()

    may_raise.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.may_raise, df.rowwise)

    class Leaves:
        def __enter__(self): ...
        def __exit__(self, *error):
            raise ValueError("on the way out")

    fast = df.compile(lambda x: torch.ops.dynaflow_test.may_raise(x) + 1, strategy=df.NanoBatch(2), strict=True, runtime=runtime,
                      part_context=lambda parts: [Leaves() for _ in parts])  # fmt: skip
    with pytest.raises(RuntimeError, match="boom") as caught:
        fast(torch.randn(4, 3))
    assert any("ValueError: on the way out" in note for note in caught.value.__notes__)
    is_bad[0] = False
    with pytest.raises(ValueError, match="on the way out"):
        fast(torch.randn(4, 3))
