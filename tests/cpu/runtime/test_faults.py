"""An op that raises at launch i, for any i, leaves the engine right for the next call; the error tells the story."""

import inspect
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import dynaflow as df
from dynaflow.runtime import threads
from dynaflow.runtime.program import Call
from tests.cpu.runtime.models import Net


class Fault(RuntimeError):
    pass


class Lanes(df.Strategy):
    """Two parts, each on a lane of its own."""

    def schedule(self, flow):
        flow.split(2)
        while ready := flow.get_ready_ops():
            flow.execute(ready[0], stream=f"lane{ready[0].part.lo}")


@pytest.fixture
def inject(monkeypatch):
    """Make the launch with a given number raise; None: nothing does. Every runtime calls a launch's entry."""
    state = {"number": None, "seen": 0}
    lock = threading.Lock()
    plain = Call.__init__

    def init(self, entry, args, outs, launch, mutates, kind):
        def call(given):
            with lock:
                number, state["seen"] = state["seen"], state["seen"] + 1
            if number == state["number"]:
                raise Fault(launch.label)
            return entry.call(given)

        plain(self, replace(entry, call=call), args, outs, launch, mutates, kind)

    monkeypatch.setattr(Call, "__init__", init)

    def set_number(number):
        state.update(number=number, seen=0)

    return set_number


@pytest.mark.parametrize("runtime", ["threads", "serial", "fake:lazy"])
def test_a_fault_at_any_launch(inject, runtime):
    torch.manual_seed(0)
    model = Net()
    fast = df.compile(model, strategy=Lanes(), strict=True, runtime=runtime)
    x = torch.randn(6, 4)
    with torch.no_grad():
        wanted, _ = model(x, torch.zeros(6, 4))
        inject(None)
        assert torch.allclose(fast(x, torch.zeros(6, 4))[0], wanted)
        num_launches = df.stats(fast).num_launches
        for number in range(num_launches):
            inject(number)
            with pytest.raises(Fault) as error:
                fast(x, torch.zeros(6, 4))
            story = "\n".join(error.value.__notes__)
            assert f"raised by '{error.value}' on " in story and f"of {num_launches}" in story
            assert "tensors of yours that this call may have changed already: " in story
            inject(None)
            cache = torch.zeros(6, 4)
            assert torch.allclose(fast(x, cache)[0], wanted) and torch.allclose(cache, model.a(x).relu())


SCRIPT = """
import torch, dynaflow as df
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)
        self.register_buffer("n", torch.zeros(()))
    def forward(self, x, cache):
        self.n += 1
        h = self.a(x).relu_() + self.b(x)
        left, right = h.chunk(2, -1)
        cache.add_(left)
        return h.softmax(-1), right * cache
x = torch.randn(6, 4)
for strategy in (df.TwoBatch(), df.Branches(3)):
    print(df.explain(Net(), (x, torch.zeros(6, 4)), strategy).plan)
"""


def test_the_same_plan_text_in_every_process():
    texts = set()
    for seed in ("0", "1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True, env={"PYTHONHASHSEED": seed}
        )
        texts.add(done.stdout)
    assert len(texts) == 1 and "launch a 0/2 @compute" in texts.pop()


def test_a_compiled_call_inside_a_launch_runs_where_it_is():
    inner = df.compile(torch.relu, strategy=df.TwoBatch(), strict=True)

    @torch.library.custom_op("dynaflow_test::nested", mutates_args=())
    def nested(x: torch.Tensor) -> torch.Tensor:
        return inner(x).clone()

    nested.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.nested, df.rowwise)
    outer = df.compile(lambda x: torch.ops.dynaflow_test.nested(x * 2) + 1, strategy=df.TwoBatch(), strict=True)
    x = torch.randn(8, 3)
    done = threading.Thread(target=lambda: results.append(outer(x)), daemon=True)
    results = []
    with torch.no_grad():
        inner(x)
        done.start()
        done.join(60)
    assert results and torch.equal(results[0], torch.relu(x * 2) + 1)


def test_idle_lanes_keep_nothing_alive():
    import gc
    import weakref

    fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="threads")
    x = torch.randn(6, 4)
    with torch.no_grad():
        y = fast(x)
    alive = weakref.ref(x), weakref.ref(y)
    del x, y
    gc.collect()
    assert alive[0]() is None and alive[1]() is None


@pytest.fixture
def hears_ctrl_c():
    """A shell's job in the background is started with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_interrupted_while_waiting(hears_ctrl_c):
    """Ctrl-C on the caller's thread while a lane works: the call ends with it, and the next one is right."""
    import _thread
    import time

    is_armed = [False]

    def slow(x):
        if is_armed[0]:
            is_armed[0] = False
            _thread.interrupt_main()
        time.sleep(0.2)
        return x + 1

    op = torch.library.custom_op("dynaflow_test::slow", slow, mutates_args=(), schema="(Tensor x) -> Tensor")
    op.register_fake(lambda x: torch.empty_like(x))
    df.register_split_rule(torch.ops.dynaflow_test.slow, df.rowwise)
    fast = df.compile(lambda x: torch.ops.dynaflow_test.slow(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="threads")
    x = torch.randn(4, 3)
    with torch.no_grad():
        assert torch.equal(fast(x), (x + 1) * 2)
        is_armed[0] = True
        with pytest.raises(KeyboardInterrupt):
            fast(x)
        assert torch.equal(fast(x), (x + 1) * 2)


def interrupt_at_line(number, code, what):
    """Run `what`; Ctrl-C comes at the given line event of `code`. Returns whether it came."""
    left = [number]
    lines, first = inspect.getsourcelines(code)

    def local(frame, event, arg):
        # CPython lets no signal in between the end of a with block and its __exit__, which count as the line of the `with`.
        if event == "line" and not lines[frame.f_lineno - first].lstrip().startswith("with "):
            left[0] -= 1
            if left[0] < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code is code else None)
    try:
        what()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_interrupted_at_any_line_that_posts_work():
    """Ctrl-C anywhere in `_issue`, also while only some lanes have their work: the next call is right, and lanes work."""
    fast = df.compile(Net(), strategy=Lanes(), strict=True, runtime="threads")
    x = torch.randn(6, 4)
    told = []

    def work():
        with torch.no_grad():
            wanted = fast(x, torch.zeros(6, 4))[0]
            number = 0
            while interrupt_at_line(number, threads._issue.__code__, lambda: fast(x, torch.zeros(6, 4))):
                number += 1
                assert torch.equal(fast(x, torch.zeros(6, 4))[0], wanted)
                assert not threads._here.is_launching
            told.append(number)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    worker.join(30)
    assert told and told[0] > 15, "a lane waits for ever" if worker.is_alive() else "no line was interrupted"


def test_after_a_fork_the_child_has_lanes_of_its_own():
    script = """
import os, torch, dynaflow as df
torch.set_grad_enabled(False)
fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="threads")
x = torch.randn(6, 4)
wanted = fast(x)
pid = os.fork()
ok = torch.equal(fast(x), wanted)
if pid == 0:
    os._exit(0 if ok else 1)
assert os.waitpid(pid, 0)[1] == 0 and ok
print("both")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"})
    assert done.stdout.strip() == "both", done.stderr


def test_lanes_that_are_not_idle_yet_do_not_take_the_process_down_at_its_end():
    script = """
import torch, dynaflow as df
from dynaflow.runtime import lanes
torch.set_grad_enabled(False)
torch.clear_autocast_cache = lambda: [torch.randn(300, 300) @ torch.randn(300, 300) for _ in range(200)]  # what a lane does last
fast = df.compile(lambda x: torch.sin(x) * 2, strategy=df.TwoBatch(), strict=True, runtime="threads")
fast(torch.randn(6, 4))
print("called")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout.strip()) == (0, "called"), done.stderr


def test_what_torch_keeps_per_thread_is_gone_before_python_is():
    """A lane is over for Python before its thread is: what goes last, there, takes its time and needs Python."""
    script = """
import threading, time, torch
from dynaflow.runtime import threads

class Slow:
    def __del__(self):
        time.sleep(0.3)
        print("gone")

def leave(main=threading.get_ident()):
    if threading.get_ident() != main:
        torch._C._stash_obj_in_tls("dynaflow", Slow())

threads.side_by_side(leave)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout.strip()) == (0, "gone"), done.stderr


def test_a_recording_that_outlives_its_module_says_nothing():
    """The end of a process takes modules apart in any order. Behind a graph break, captures hang on the model's own code: it goes last."""
    script = """
import torch, dynaflow as df

class Broken(torch.nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x * 2 + 1

fast = df.compile(Broken(), runtime="graph", compiler="eager")
for _ in range(3):
    y = fast(torch.randn(2, 4))
print("called")
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=120,
                          env={"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "called", "")


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 lets go of what a thread has without taking Python's lock")
def test_what_gloo_keeps_of_a_message_is_gone_before_python_is():
    """Whoever waited for a message has gone on while gloo's thread still lets go of it: that takes its time and needs Python."""
    script = """
import os, threading, time, torch, torch.distributed as dist, dynaflow
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
began = threading.Event()

class Slow:
    def __del__(self, main=threading.get_ident()):
        if threading.get_ident() == main:
            return  # gloo was faster: once more
        began.set()
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            pass
        print("gone")

while not began.wait(0.01):
    torch._C._stash_obj_in_tls("dynaflow", Slow())  # a message keeps what its sender's thread has
    dist.all_reduce(torch.ones(3), async_op=True)
    torch._C._stash_obj_in_tls("dynaflow", None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stdout.strip()) == (0, "gone"), done.stderr
