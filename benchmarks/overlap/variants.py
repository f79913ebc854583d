"""The ways to run a workload, all in CUDA Graphs on a GPU: sequential; per strategy its plan on one stream and as it is; and the bounds.

    sequential          the graph as it is
    X, one stream       strategy X's parts and order, split but not overlapped
    X                   split and overlapped; or what it measures to be faster (`never_slower=True`)
    compute alone       the model without its collectives
    network alone       its collectives without the model, one after another
    side by side        both of these at once, on two streams, nothing waiting for anything: what these kernels can reach
    X, side by side     the same with strategy X's parts, of compute and of collectives: what its own kernels can reach
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

import dynaflow as df
from benchmarks import variants
from benchmarks.cases import Call
from benchmarks.overlap.rows import DECODE, EP, SP, TP, Case
from benchmarks.variants import Builder, NotAvailable, entry
from dynaflow import strategies
from dynaflow.functions.chunked import Chunked
from dynaflow.ir import CALLER, WHOLE

SEQUENTIAL, COMPUTE, NETWORK, BESIDE = "sequential", "compute alone", "network alone", "side by side"
SHARED = (SEQUENTIAL, COMPUTE, NETWORK, BESIDE)
# groups of ways, a callable each
ON_ONE_STREAM, OVERLAPPED = "on one stream", "overlapped"

# strategy -> the kinds of workload that it is for; those that this version of df lacks are reported as not available
STRATEGIES: dict[str, tuple[str, ...]] = {
    "TwoBatch": (TP, EP, SP),
    "NanoFlow": (TP, EP),
    "DualBatch": (EP,),
    "SingleBatch": (EP,),
    "CommOverlap": (TP, EP, SP),
    "TokenWeave": (TP,),
    "FusedGemm": (TP,),
}
# for a batch in which some rows prefill and others decode: none of the workloads has one
WITHOUT_WORKLOAD = ("PrefillDecode",)


def one_stream(name: str) -> str:
    return f"{name}, one stream"


def in_parts(name: str) -> str:
    return f"{name}, {BESIDE}"


# settings under which few tokens are enough: tiny models have no more, and strategies would give up
FEW_TOKENS = {"min_tokens": 0, "min_decode_tokens": 0, "min_part_tokens": 1, "min_chunk_tokens": 1, "wave": 1}


def is_there(name: str) -> bool:
    return getattr(df, name, None) is not None or getattr(strategies, name, None) is not None


def find(name: str, tiny: bool = False) -> df.Strategy:
    """The strategy by its name, with its own settings; for tiny models, those under which it does not give up."""
    found = getattr(df, name, None) or getattr(strategies, name, None)
    if found is None:
        raise NotAvailable(f"dynaflow {df.__version__} has no strategy {name}")
    known = inspect.signature(found).parameters if tiny else {}
    return found(**{key: value for key, value in FEW_TOKENS.items() if key in known})


class OneStream(df.Strategy):
    """Another strategy's launches in its order, all on the caller's stream: the price of its parts, nothing won back.

    caller | A0 A1 a0 B0 a1 B1 ...

    `chosen`: of its options, those that were measured to be fastest (`df.stats(fast).measured`).
    """

    def __init__(self, inner: df.Strategy, chosen: tuple[int, ...] = ()):
        self.inner, self.chosen = inner, chosen
        # the parts of its network ops when it planned last; the whole batch is none
        self.parts: tuple[df.Part, ...] = ()

    def schedule(self, flow: Any) -> None:
        alone = _Alone(flow, self.chosen)
        self.inner.schedule(alone)  # type: ignore[arg-type]
        self.parts = tuple(sorted(part for part in alone.parts if not part.is_whole))


class InParts(df.Strategy):
    """Everything in parts, which take turns: a strategy's kernels without its network.

    caller | A0 A1 B0 B1 ...
    """

    def __init__(self, parts: tuple[df.Part, ...]):
        self.parts = parts

    def schedule(self, flow: Any) -> None:
        flow.split([0, *(part.bounds(flow.context.batch_size)[1] for part in self.parts)])
        while ready := flow.get_ready_ops():
            flow.execute(min(ready, key=lambda r: (r.depth, r.part)))


class _Alone:
    """A flow that has no other stream than the caller's, and of options those that are chosen."""

    def __init__(self, flow: Any, chosen: tuple[int, ...]):
        self._flow, self._chosen = flow, list(chosen)
        # those of network ops
        self.parts = set[df.Part]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._flow, name)

    def stream(self, name: str, **_: Any) -> str:
        return CALLER

    def any_of(self, *options: Any) -> Any:
        return options[min(self._chosen.pop(0), len(options) - 1)] if self._chosen else options[0]

    def execute(self, ready: Any, stream: str = CALLER, **more: Any) -> Any:
        items = ready if isinstance(ready, (list, tuple)) else [ready]
        self.parts |= {item.part for item in items if item.kind == "network"}
        if isinstance(more.get("replace"), Chunked):  # it has a stream of its own
            more["replace"] = more["replace"].serialised()
        return self._flow.execute(ready, stream=CALLER, **more)


class Ways(df.Strategy):
    """Several strategies in one callable, told apart by the tag `way`: the model is captured, and its ops are compiled, once for all."""

    def __init__(self, ways: Mapping[str, df.Strategy]):
        self.ways = dict(ways)

    def schedule(self, flow: Any) -> None:
        self.ways[flow.context.tags["way"]].schedule(flow)


def in_way(case: Case, name: str) -> contextlib.AbstractContextManager[Any]:
    """The tags that strategies ask for."""
    phase = {"phase": "decode"} if case.workload.phase == DECODE else {}
    return df.context(way=name, **phase)


# -- one builder per variant


def _is_cuda(case: Case) -> bool:
    return case.generator.device.type == "cuda"


def _way(name: str, group: str) -> Builder:
    """One of a group's ways; the callable that has them all is made for the first of them."""

    def build(case: Any, options: Mapping[str, Any]) -> Call:
        if name in STRATEGIES:
            find(name)  # or there is no such way
        if group not in case.callables:
            case.callables[group] = _callable(case, group, options)
        fast = case.callables[group]

        def call(number: int) -> Any:
            with in_way(case, case.taken.get(name, name)):
                return fast(**case.args(number))

        call.fast = fast  # type: ignore[attr-defined]
        return call

    return build


def _callable(case: Any, group: str, options: Mapping[str, Any]) -> Any:
    """Compute alone and sequential have one way each. What is slower on one stream is wanted so."""
    runtime = {"runtime": "graph", "borrow": True} if _is_cuda(case) else {"runtime": "threads"}
    module, partition = (case.bare, "auto") if group == COMPUTE else (case.module, case.workload.partition)
    if group in (COMPUTE, SEQUENTIAL):
        strategy: df.Strategy = df.Sequential()
    else:
        known = {name: find(name, case.tiny) for name, kinds in STRATEGIES.items() if case.workload.kind in kinds and is_there(name)}
        if group == ON_ONE_STREAM:
            case.alone = {name: OneStream(s) for name, s in known.items()}
        strategy = Ways(known if group == OVERLAPPED else {one_stream(name): s for name, s in case.alone.items()})
        case.ways[group] = strategy
    never_slower = group == OVERLAPPED and _is_cuda(case)
    return df.compile(module, strategy=strategy, partition=partition, never_slower=never_slower, **runtime, **options)


def _sender(case: Case, parts: Sequence[df.Part] = (WHOLE,)) -> Callable[[], None]:
    """All collectives of a step, each part by part, on memory of their own."""
    sent = case.collectives()
    if not sent:
        raise NotAvailable("the model sends nothing")
    given = {s.shape: torch.randn(s.shape, dtype=case.dtype, device=case.generator.device) for s in sent}
    rows = [part.bounds(case.workload.sizes(case.tiny)[0]) for part in parts]

    def send() -> None:
        for s in sent:
            for start, stop in rows:
                s.again(given[s.shape][start:stop])

    return send


def _recorded(step: Callable[[], Any], load: Callable[[int], None] = lambda number: None) -> Call:
    """In one CUDA Graph; `load` is called before each replay."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = step()

    def replay(number: int) -> Any:
        load(number)
        graph.replay()
        return kept

    replay.step = step  # type: ignore[attr-defined]  (it holds the memory that the graph reads)
    return replay


def _network(case: Any, _: Mapping[str, Any]) -> Call:
    send = _sender(case)
    return _recorded(send) if _is_cuda(case) else lambda number: send()


def _side_by_side(case: Any, fast: Callable[..., Any], send: Callable[[], None]) -> Call:
    comm = torch.cuda.Stream(priority=-1)
    static = {name: x.clone() for name, x in case.sets[0].items()}

    def both() -> Any:
        case.reset()
        comm.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(comm):
            send()
        result = fast(**static, **case.state)
        torch.cuda.current_stream().wait_stream(comm)
        return result

    def load(number: int) -> None:  # as every other way does
        for name, slot in static.items():
            slot.copy_(case.sets[number % len(case.sets)][name], non_blocking=True)

    return _recorded(both, load)


def _beside(case: Any, _: Mapping[str, Any]) -> Call:
    return _side_by_side(case, torch.compile(entry(case.bare)), _sender(case))


def _beside_in_parts(name: str) -> Builder:
    """Strategies that cut alike share one recording."""

    def build(case: Any, options: Mapping[str, Any]) -> Call:
        parts = case.alone[name].parts if name in case.alone else ()
        if not parts:
            raise NotAvailable(f"{name} splits nothing that is sent")
        if parts not in case.beside:
            fast = df.compile(case.bare, strategy=InParts(parts), strict=True, **options)
            case.beside[parts] = _side_by_side(case, fast, _sender(case, parts))
        return case.beside[parts]  # type: ignore[no-any-return]

    return build


class Variants(variants.Variants):
    """Others load beside this process: what is faster is measured later, by `choose`."""

    builders = {
        SEQUENTIAL: _way(SEQUENTIAL, SEQUENTIAL),
        COMPUTE: _way(COMPUTE, COMPUTE),
        NETWORK: _network,
        BESIDE: _beside,
        **{one_stream(name): _way(one_stream(name), ON_ONE_STREAM) for name in STRATEGIES},
        **{in_parts(name): _beside_in_parts(name) for name in STRATEGIES},
        **{name: _way(name, OVERLAPPED) for name in STRATEGIES},
    }
    on_cuda_only = frozenset({BESIDE, *map(in_parts, STRATEGIES)})

    def _build(self, name: str) -> variants.Variant:
        with df.unmeasured():
            return super()._build(name)

    def fallbacks(self, variant: variants.Variant) -> Mapping[str, int]:
        return {}  # several ways share a callable: `choose` tells them apart

    def choose(self, name: str) -> tuple[str, bool]:
        """Let a strategy's plans be measured. (why it gave up, empty where it did not; whether its plan splits the batch)

        What it is held against, its parts on one stream and side by side, is of the option that was fastest from here on."""
        call = self._made[name].call
        stats = df.stats(call.fast)  # type: ignore[attr-defined]
        fallbacks, num_in_parts, known = Counter(stats.fallbacks), stats.num_part_launches, list(stats.measured)
        self.steps(call, 1)
        new = [measured for measured in stats.measured if measured not in known]
        if new and any(new[-1].chosen):
            self._take(name, new[-1].chosen)
        gave_up = next(iter(stats.fallbacks - fallbacks), "").partition("\n")[0]
        times = f": {new[-1]}" if gave_up and new and new[-1].winner is None else ""
        return gave_up + times, stats.num_part_launches > num_in_parts

    def _take(self, name: str, chosen: tuple[int, ...]) -> None:
        case: Any = self.case
        if (one := self._made.get(one_stream(name))) is None:
            return
        way = f"{one_stream(name)}, options {chosen}"
        case.alone[name] = case.ways[ON_ONE_STREAM].ways[way] = OneStream(case.alone[name].inner, chosen)
        case.taken[one_stream(name)] = way
        with df.unmeasured():
            self.steps(one.call, 4)
        for known in (self._made, self.missing):
            known.pop(in_parts(name), None)
        self.get(in_parts(name))
