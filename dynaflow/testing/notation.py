"""Small flows as text, for tests of plans.

    flow = flow_of('''
        input x
        param w state                     # state: no batch axis
        input view of x                   # the same memory under another name
        home h a b                        # a and b are pieces of h
        norm: x -> h
        ar network group:tp: h -> r       # kind and tokens (`rng`, or with a colon) stand behind the name
        scan whole: r -> s                # whole: it cannot be split
        add: r! x -> y                    # r is changed in place
        mean whole: y -> m^               # m has no batch axis
        output y
    ''')
"""

from __future__ import annotations

from dataclasses import replace

from dynaflow.ir import KINDS, Flow, Op, Value


def flow_of(text: str, name: str = "toy") -> Flow:
    """Every value is [B, 4] float32, or [4] where it is a state. What is written and no output is a temporary."""
    values: dict[str, Value] = {}
    ops: list[Op] = []
    outputs: list[str] = []
    for line in text.splitlines():
        words = line.split("#")[0].split()
        if not words:
            continue
        if words[0] in ("input", "param"):
            storage = words[words.index("of") + 1] if "of" in words else words[1]
            values[words[1]] = _value(words[1], words[0], "state" in words, storage)
        elif words[0] == "home":
            home, is_state = words[1].rstrip("^"), words[1].endswith("^")
            values[home] = _value(home, "temp", is_state, home)
            values.update((piece, replace(_value(piece, "piece", is_state, piece), home=home)) for piece in words[2:])
        elif words[0] == "output":
            outputs += words[1:]
        else:
            ops.append(_op(line.split("#")[0], values))
    for output in outputs:
        if values[output].role == "temp":
            values[output] = replace(values[output], role="output")
    return Flow(name, tuple(values.values()), tuple(ops), tuple(outputs), ("s0",), ("s0",))


def _op(line: str, values: dict[str, Value]) -> Op:
    head, _, body = line.partition(": ")
    op, *marks = head.split()
    takes, _, makes = body.partition("->")
    inputs, outs = takes.split(), makes.split()
    for out in outs:
        values.setdefault(out.rstrip("^"), _value(out.rstrip("^"), "temp", out.endswith("^"), out.rstrip("^")))
    return Op(
        op, next((mark for mark in marks if mark in KINDS), "compute"), tuple(i for i in inputs if not i.endswith("!")),
        tuple(out.rstrip("^") for out in outs), tuple(i.rstrip("!") for i in inputs if i.endswith("!")),
        tuple(mark for mark in marks if mark == "rng" or ":" in mark), "it mixes the batch" if "whole" in marks else "",
    )  # fmt: skip


def _value(name: str, role: str, is_state: bool, storage: str) -> Value:
    shape, nbytes = (("4",), "16") if is_state else (("s0", "4"), "16*s0")
    return Value(name, shape, "float32", nbytes, None if is_state else 0, role, storage)
