"""cuBLAS's workspaces: for whom, how large, and what plans may hold with them."""

import contextlib
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dynaflow.costs import Cost
from dynaflow.ir import Stream
from dynaflow.room import Beside, Room, freed_bytes
from dynaflow.runtime import workspaces
from dynaflow.runtime.program import Bound
from dynaflow.runtime.workspaces import is_product, make_workspace, workspace_bytes
from dynaflow.strategies.confined import Confined
from dynaflow.testing.notation import flow_of
from tests.cpu.inductor.kernel_samples import read

MIB = 2**20
A, B, C = Stream("aux0"), Stream("aux1"), Stream("critical", -1)


@pytest.mark.parametrize("target, wanted", [
    ("extern_kernels.mm", True), ("extern_kernels.addmm", True), ("extern_kernels.bmm", True), ("torch.ops.aten._scaled_mm.default", True),
    ("extern_kernels.bias_addmm", True), ("extern_kernels.mm_dtype", True), ("extern_kernels.conv1x1_via_mm", True),
    ("aten.addmm.out", True), ("triton_poi_fused_mm_0", False), ("torch.ops.aten.add_.Tensor", False),
    ("torch.ops.aten._scaled_dot_product_flash_attention.default", False),
])  # fmt: skip
def test_which_kernels_are_products(target, wanted):
    assert is_product(target) == wanted


@pytest.mark.parametrize("target", ["extern_kernels.convolution", "torch.ops.aten.convolution_backward.default"])
@pytest.mark.parametrize("is_there, is_enabled", [(True, True), (False, True), (True, False)])
def test_convolutions_are_products_where_there_is_no_cudnn(monkeypatch, target, is_there, is_enabled):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: is_there)
    with torch.backends.cudnn.flags(enabled=is_enabled):
        assert is_product(target) != (is_there and is_enabled)


def test_a_workspace_is_what_the_environment_says(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:2:16:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert workspace_bytes(torch.device("cuda")) == (4096 * 2 + 16 * 8) * 1024
    assert workspace_bytes(torch.device("cpu")) == 0


# -- which streams


def streams_of(plan, products):
    """What a plan of (op, stream) launches says; the streams are A, B and C."""
    launches = [SimpleNamespace(stream=stream, calls=((op, None),)) for op, stream in plan]
    flow = SimpleNamespace(op=lambda name: SimpleNamespace(kind=name.partition(".")[0]))
    program = SimpleNamespace(products=products, flow=flow)
    bound = SimpleNamespace(program=program, plan=SimpleNamespace(launches=launches), streams=(A, B, C))
    return Bound.product_streams.func(bound)


def test_streams_without_products_need_none():
    plan = [("conv.0", "aux0"), ("mm.1", "aux1"), ("mm.2", "caller"), ("relu.3", "critical")]
    assert streams_of(plan, frozenset({"mm.1", "mm.2"})) == {B}
    assert streams_of(plan, frozenset({"mm.2"})) == set(), "the caller's own is no side stream"
    assert streams_of(plan, frozenset({"mm.1", "relu.3"})) == {B, C}


def test_where_nobody_knows_every_side_stream_that_computes_may_need_one():
    plan = [("compute.0", "caller"), ("compute.1", "aux0"), ("network.2", "aux1"), ("copy.3", "aux1"), ("memory.4", "critical")]
    assert streams_of(plan, None) == {A, C}


def test_a_wrapper_says_which_of_its_kernels_are_products():
    made = read("""
        buf0 = empty_strided_cuda((4, 4), (4, 1), torch.float32)
        extern_kernels.mm(arg0_1, arg0_1, out=buf0)
        triton_poi_fused_add_1.run(buf0, 16, stream=stream0)
        return (buf0, )
    """, torch.zeros(4, 4))  # fmt: skip
    assert made.program.products == {"mm.0"}


# -- where they lie


@pytest.fixture
def torchs(monkeypatch):
    """torch's map of workspaces: stream -> where it lies. It refuses memory that another thread allocates from."""
    found, memory, current, busy = {}, ["ordinary"], [None], threading.Lock()

    @contextlib.contextmanager
    def use(pool, index):
        assert busy.acquire(blocking=False), "already recording to mempool_id"
        before, memory[0] = memory[0], "its own"
        yield
        memory[0] = before
        busy.release()

    @contextlib.contextmanager
    def on(stream):
        before, current[0] = current[0], stream.cuda_stream
        yield
        current[0] = before

    def handle():
        time.sleep(0.01)  # libraries are slow to start, and let other threads run
        found.setdefault(current[0], memory[0])

    for name, fake in {"use_mem_pool": use, "stream": on, "current_blas_handle": handle, "MemPool": object,
                       "device": lambda index: contextlib.nullcontext(), "is_current_stream_capturing": lambda: False,
                       "get_allocator_backend": lambda: "native"}.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(workspaces, "_memory", {})
    return SimpleNamespace(found=found, product=lambda stream: on(stream).__enter__() or handle())


STREAM = SimpleNamespace(cuda_stream=7, device_index=0, device=torch.device("cpu"))


def test_a_workspace_lies_in_memory_of_its_own(torchs):
    make_workspace(STREAM)
    assert torchs.found == {7: "its own"}


def test_where_torch_gave_it_back_there_is_another_before_the_next_product(torchs):
    make_workspace(STREAM)
    torchs.found.clear()
    make_workspace(STREAM)
    torchs.product(STREAM)
    make_workspace(STREAM, is_recorded=True)
    assert torchs.found[7] == "its own"


def test_without_it_a_product_takes_what_there_is(torchs):
    """The twin."""
    torchs.product(STREAM)
    assert torchs.found[7] == "ordinary"


def test_threads_make_theirs_one_after_the_other(torchs):
    failed = []

    def make():
        try:
            for raw in range(3):
                make_workspace(SimpleNamespace(cuda_stream=raw, device_index=0))
        except AssertionError as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and set(torchs.found.values()) == {"its own"}


# -- what there is room for


def holding(mib, streams=(), has_products=True):
    """A plan that holds so much, with products on these side streams."""
    products = frozenset({"mm.0"} if has_products else ())
    return SimpleNamespace(peak_bytes=mib * MIB, product_streams=frozenset(streams), program=SimpleNamespace(products=products))


@pytest.fixture
def room(monkeypatch):
    """Inductor's order holds 100 MiB that are given, 60 of its own and one workspace of 32: plans may hold 240."""
    monkeypatch.setattr("dynaflow.room.workspace_bytes", lambda device: 32 * MIB)
    return Room([torch.empty(100 * MIB, dtype=torch.uint8)], holding(60), 1.25)


def test_what_is_given_and_workspaces_count(room):
    assert room.limit == 240 * MIB and room.held(holding(60)) == 192 * MIB
    assert room.held(holding(60, [A, B])) == 256 * MIB
    assert room.take(holding(76, [A])), "100 given, 76, and two workspaces: as much as there may be"


def test_rejects_what_holds_more(room):
    assert not room.take(holding(77, [A]))
    assert not room.take(holding(60, [A, B])), "a third workspace is one too many"
    assert room.take(holding(60, [A])), "nothing is kept of what was refused"


def test_streams_of_plans_that_were_tried_count(room):
    assert room.take(holding(60, [A]))
    assert room.take(holding(76, [A])), "the same stream has the same workspace"
    assert not room.take(holding(60, [C])), "it would be there beside the first one's"
    assert not room.take(holding(77)), "the first one's stays"


def test_without_products_nothing_is_kept(monkeypatch):
    monkeypatch.setattr("dynaflow.room.workspace_bytes", lambda device: 32 * MIB)
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], holding(60, has_products=False), 1.25)
    assert room.limit == 200 * MIB
    assert room.take(holding(100, has_products=False)) and not room.take(holding(101, has_products=False))


def test_the_factor_is_the_users(monkeypatch):
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], holding(60), 2.0)
    assert room.limit == 320 * MIB and room.take(holding(220, [A, B])) and not room.take(holding(221))


@pytest.mark.parametrize("given, limit", [(0, 4 + 2), (968, 1.25 * 972)])
def test_small_models_may_hold_a_little_more(given, limit):
    """The allocator asks for no less than two megabytes at a time."""
    assert Room([torch.empty(given * MIB, dtype=torch.uint8)], holding(4, has_products=False), None).limit == limit * MIB


@pytest.mark.parametrize("gradients, limit", [(0, 200), (10, 200), (60, 200), (80, 225)])
def test_gradients_come_beside_what_stands(gradients, limit):
    """In Inductor's order they take the place of what was saved, as far as that goes: 60 MiB. Beside a plan they come on top."""
    given = [torch.empty(100 * MIB, dtype=torch.uint8)]
    room = Room(given, holding(60, has_products=False), 1.25, beside=Beside(gradient_bytes=gradients * MIB))
    assert room.limit == limit * MIB and room.held(holding(60, has_products=False)) == (160 + gradients) * MIB
    assert room.take(holding(limit - 100 - gradients, has_products=False))
    assert not room.take(holding(limit - 99 - gradients, has_products=False))


def test_what_inductor_lets_go_of_is_not_in_its_peak():
    given = [torch.empty(100 * MIB, dtype=torch.uint8)]
    room = Room(given, holding(60, has_products=False), 1.25, beside=Beside(freed_bytes=40 * MIB))
    assert room.limit == 150 * MIB and room.held(holding(60, has_products=False)) == 160 * MIB
    assert not room.take(holding(51, has_products=False)) and room.take(holding(50, has_products=False))


def backward_flow():
    """Gradients of a and b: each takes the place of what was saved for it, s of b's and then r of a's."""
    flow = flow_of("""
        input s
        input r
        input t
        param w
        by_b: t s -> b
        onward: t w -> u
        by_a: u r -> a
        output b a
    """)
    sizes = {"s": 40, "r": 30, "t": 5, "w": 100, "u": 5, "a": 20, "b": 25}
    return replace(flow, values=tuple(replace(v, nbytes=str(sizes[v.name])) for v in flow.values))


@pytest.mark.parametrize("saved, freed", [
    ("", 0),
    ("r", 0),  # it is needed to the last, where most is made
    ("s", 40 + 50 - 65),  # at the peak now, b and s are there
    ("sr", 70 + 50 - 95),
    ("srt", 75 + 50 - 100),
])  # fmt: skip
def test_what_is_let_go_in_the_midst_of_a_backward(saved, freed):
    """50 is the most that is made, at the end."""
    assert freed_bytes(backward_flow(), set(saved)) == freed


# given, MiB -> workspaces that there is room for
SPARE = {100: 1, 600: 5, 2000: 16}


@pytest.mark.parametrize("given", SPARE)
def test_products_stay_on_as_many_streams_as_may_have_a_workspace(monkeypatch, given):
    monkeypatch.setattr("dynaflow.room.workspace_bytes", lambda device: 32 * MIB)
    room = Room([torch.empty(given * MIB, dtype=torch.uint8)], holding(60), None)
    assert room.num_spare == SPARE[given]
    many, few = ({"mm.0": Cost(us), "conv.1": Cost(90.0)} for us in (90.0, 9.0))
    products = frozenset({"mm.0"})
    assert list(room.confined(many)) == [Confined(((products, 1 + SPARE[given]),)), Confined(((products, 1),))]
    assert list(room.confined(few)) == [Confined(((products, 1),))], "a tenth of the time is not worth a workspace"


@pytest.mark.parametrize("given, num_made", [(100, 0), (420, 0), (600, 3), (2000, 7)])
def test_streams_to_measure_products_by_are_plans_streams_then(monkeypatch, given, num_made):
    monkeypatch.setattr("dynaflow.room.workspace_bytes", lambda device: 32 * MIB)
    room = Room([torch.empty(given * MIB, dtype=torch.uint8)], holding(60), None)
    streams = tuple(Stream(f"aux{i}") for i in range(7))
    before = room.held(holding(60))
    made = room.make(streams)
    assert made == streams[:num_made]
    assert room.held(holding(60)) == room.held(holding(60, made)) == before + num_made * 32 * MIB
    if made:
        assert room.take(holding(60, [C])), "one more, of another priority"


def test_without_products_nothing_is_confined(monkeypatch):
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], holding(60, has_products=False), None)
    assert list(room.confined({"conv.1": Cost(90.0)})) == [Confined()]


# -- what the allocator keeps for kernels that allocate


def launched(mib, where, loose=()):
    """A plan that holds so much; op -> the stream that it runs on. Each op writes what is called like it, 15 MiB."""
    launches = [SimpleNamespace(stream=stream, calls=[(op, None)]) for op, stream in where.items()]
    streams = [Stream(name) for name in dict.fromkeys(where.values()) if name != "caller"]
    program = SimpleNamespace(products=frozenset(), flow=SimpleNamespace(op=lambda name: SimpleNamespace(writes=(name,))))
    plan = SimpleNamespace(launches=launches, loose=loose)
    return SimpleNamespace(
        peak_bytes=mib * MIB, product_streams=frozenset(), streams=streams, plan=plan, program=program, nbytes=lambda value: 15 * MIB)


HELD = {"conv.0": Cost(10.0, 1.0, 20 * MIB), "conv.1": Cost(10.0, 1.0, 12 * MIB), "poi.2": Cost(10.0), "sdpa.3": Cost(5.0, 1.0, 20 * MIB)}
ALONE = dict.fromkeys(HELD, "caller")


def allocating_room(loose=("sdpa.3",)):
    return Room([torch.empty(100 * MIB, dtype=torch.uint8)], launched(40, ALONE, loose), 1.25, HELD)


def test_what_kernels_allocate_is_kept_per_stream():
    room = allocating_room()
    assert room.limit == 1.25 * (100 + 40 + 20) * MIB
    assert room.held(launched(40, ALONE | {"conv.1": "aux0"})) == (140 + 20 + 12) * MIB
    assert room.held(launched(40, ALONE | {"poi.2": "aux0"})) == (140 + 20) * MIB, "it allocates nothing"
    assert not room.take(launched(49, ALONE | {"conv.1": "aux0", "sdpa.3": "aux1"}))
    assert room.take(launched(40, ALONE | {"conv.1": "aux0"}))


def test_results_are_part_of_the_peak():
    only = {name: cost for name, cost in HELD.items() if name == "sdpa.3"}
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], launched(40, ALONE, ["sdpa.3"]), 1.25, only)
    assert room.held(launched(40, ALONE, ["sdpa.3"])) == 140 * MIB
    assert room.held(launched(40, ALONE | {"sdpa.3": "aux0"}, ["sdpa.3"])) == 145 * MIB, "there, they are in a segment of their own"
    assert room.held(launched(40, ALONE)) == 160 * MIB, "not a result: memory to work in"


def test_streams_on_which_nothing_allocates_keep_nothing():
    only = {name: cost for name, cost in HELD.items() if name != "conv.1"}
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], launched(40, ALONE), 1.0, only)
    apart = ALONE | {"conv.1": "aux0", "poi.2": "aux1"}
    assert room.held(launched(40, apart)) == room.limit and room.take(launched(40, apart))


def test_what_is_held_grows_with_the_sizes():
    cost = Cost(10.0, 0.5, 20 * MIB)
    assert cost.at_sizes(1.5) == Cost(10.0, 0.5, 30 * MIB) and cost.at_sizes(0.6) == cost


def test_what_is_not_measured_yet_is_not_counted():
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], launched(40, ALONE), 1.25)
    assert room.limit == 1.25 * 140 * MIB
    room.learn(HELD)
    assert room.limit == 1.25 * 160 * MIB


def test_kernels_that_allocate_stay_on_as_many_streams_as_there_is_room_for():
    allocating = frozenset({"conv.0", "conv.1", "sdpa.3"})
    room = allocating_room()  # room for 40 MiB more
    assert list(room.confined(HELD)) == [Confined(((allocating, 3),)), Confined(((allocating, 1),))]
    few = HELD | {"poi.2": Cost(1000.0)}
    assert list(room.confined(few)) == [Confined(((allocating, 1),))], "they take too little time to be worth it"
    small = {name: Cost(cost.us, 1.0, min(cost.held_bytes, 2 * MIB)) for name, cost in HELD.items()}
    assert list(room.confined(small)) == [Confined()], "the smallest segments there is room for"


def test_where_both_are_too_much_one_gives_way(monkeypatch):
    monkeypatch.setattr("dynaflow.room.workspace_bytes", lambda device: 32 * MIB)
    serial = launched(40, ALONE)
    serial.program.products = frozenset({"conv.0"})
    room = Room([torch.empty(100 * MIB, dtype=torch.uint8)], serial, 1.5, HELD)  # of 192: 96 more
    products, allocating = frozenset({"conv.0"}), frozenset({"conv.1", "sdpa.3"})
    assert [dict(confined.groups) for confined in room.confined(HELD)] == [
        {products: 4, allocating: 5}, {products: 4, allocating: 1}, {products: 1, allocating: 5}, {products: 1, allocating: 1}]  # fmt: skip
