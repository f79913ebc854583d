"""Kernel flows for tests: written out by hand as `{op: (us, share, inputs)}`, or drawn by hypothesis."""

from hypothesis import strategies as st

from dynaflow.costs import Cost
from dynaflow.ir import Flow, Op, Value


def kernels(table, uses=()):
    """The flow and its costs. `uses`: (op, token) pairs. Every op's result that nobody reads is an output."""
    read = {name for _, _, inputs in table.values() for name in inputs}
    ends = tuple(f"{name}:0" for name in table if name not in read)

    def value(name, role):
        return Value(name, ("64",), "float32", "256", None, role, name)

    values = (value("x", "input"), *(value(f"{name}:0", "output" if f"{name}:0" in ends else "temp") for name in table))
    ops = tuple(
        Op(
            name, "compute", tuple(f"{i}:0" for i in inputs) or ("x",), (f"{name}:0",), (),
            tuple(token for op, token in uses if op == name), "a kernel has its sizes")
        for name, (_, _, inputs) in table.items()
    )  # fmt: skip
    return Flow("kernels", values, ops, ends), {name: Cost(us, share) for name, (us, share, _) in table.items()}


@st.composite
def kernel_flows(draw, max_ops=25):
    num_ops = draw(st.integers(1, max_ops))
    table = {}
    for i in range(num_ops):
        us = draw(st.floats(0.5, 30.0))
        share = draw(st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.8, 1.0]))
        inputs = sorted(draw(st.sets(st.integers(0, i - 1), max_size=3))) if i else []
        table[f"k{i}"] = (us, share, [f"k{j}" for j in inputs])
    return kernels(table)
