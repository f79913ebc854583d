"""Small flows, written out by hand, for tests of single phases."""

from dynaflow.ir import Flow, Op, Value


def value(name, axis=0, role="temp", nbytes="256*s0", storage=None):
    shape = ("s0", "64") if axis == 0 else ("64",)
    return Value(name, shape, "float32", nbytes if axis == 0 else "256", axis, role, storage or name)


def chain(num_layers=2, *, unsplittable=()):
    """x -> L0.a -> L0.ar (network) -> L1.a -> L1.ar -> ..."""
    values, ops, last = [value("x", role="input")], [], "x"
    for i in range(num_layers):
        for name, kind in ((f"L{i}.a", "compute"), (f"L{i}.ar", "network")):
            is_last = i == num_layers - 1 and kind == "network"
            values.append(value(f"{name}:0", role="output" if is_last else "temp"))
            reason = "mixes the batch" if name in unsplittable else ""
            uses = ("group:tp",) if kind == "network" else ()
            ops.append(Op(name, kind, (last,), (f"{name}:0",), (), uses, reason))
            last = f"{name}:0"
    return Flow("chain", tuple(values), tuple(ops), (last,), ("s0",), ("s0",))


def diamond():
    """x -> a; a -> b, a -> c; b, c -> d"""
    values = [value("x", role="input"), *(value(f"{n}:0") for n in "abc"), value("d:0", role="output")]
    ops = [
        Op("a", "compute", ("x",), ("a:0",)),
        Op("b", "compute", ("a:0",), ("b:0",)),
        Op("c", "compute", ("a:0",), ("c:0",)),
        Op("d", "compute", ("b:0", "c:0"), ("d:0",)),
    ]
    return Flow("diamond", tuple(values), tuple(ops), ("d:0",), ("s0",), ("s0",))


def stateful():
    """read: uses a counter without batch axis; count: changes it once; cache: changes a cache row by row; look: reads the cache"""
    values = [
        value("x", role="input"), value("n", axis=None, role="input"), value("cache", role="input"),
        value("read:0"), value("look:0", role="output"),
    ]  # fmt: skip
    ops = [
        Op("read", "compute", ("x", "n"), ("read:0",)),
        Op("count", "memory", ("n",), (), ("n",), (), "does not depend on the batch"),
        Op("cache", "memory", ("read:0", "cache"), (), ("cache",)),
        Op("look", "compute", ("cache",), ("look:0",)),
    ]
    return Flow("stateful", tuple(values), tuple(ops), ("look:0",), ("s0",), ("s0",))
