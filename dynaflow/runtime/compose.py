"""Units of fused ops -> one unit: they run one after the other, and what is made for each other alone stays a local tensor.

    norm: x, w -> h        qkv: h, w2 -> q, k      ->      x, w, w2 -> q, k
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynaflow.runtime.program import Expr, Unit


def compose(units: Sequence[Unit], needed: Collection[str]) -> Unit:
    """One unit that runs `units` in order, over one part. It takes what none of them made before, in order of first use, and returns
    those of their results that are `needed` outside.

    1. Every value and size has a register; arguments fill the first ones.
    2. A unit's results go to registers of their own. A value that is changed in place stays in its register.
    3. A register is cleared behind its last use: local tensors live no longer than they would without fusing.
    """
    # 1. and 2. registers
    register: dict[str | Expr, int] = {}
    args: list[str | Expr] = []
    made: set[str] = set()
    for unit in units:
        args += [arg for arg in dict.fromkeys(unit.args) if arg not in made and arg not in args]
        made.update(unit.outs)
    for name in (*args, *(out for unit in units for out in unit.outs)):
        register.setdefault(name, len(register))
    outs = tuple(dict.fromkeys(out for unit in units for out in unit.outs if out in needed))
    code = [(unit.fn, tuple(register[arg] for arg in unit.args), tuple(register[out] for out in unit.outs)) for unit in units]

    # 3. what is used for the last time
    seen = {register[out] for out in outs}
    lasts: list[tuple[int, ...]] = []
    for _, takes, makes in reversed(code):
        lasts.append(tuple(r for r in dict.fromkeys((*takes, *makes)) if r not in seen))
        seen.update(lasts[-1])
    steps = [(*step, last) for step, last in zip(code, reversed(lasts))]
    num_registers, returned = len(register), [register[out] for out in outs]

    def composed(*given: Any) -> list[Any]:
        values: list[Any] = [*given, *(None for _ in range(num_registers - len(given)))]
        del given
        for fn, takes, makes, last in steps:
            results = fn(*[values[r] for r in takes])
            for k, r in enumerate(makes):
                values[r] = results[k]
            del results  # or it would live until the next ones are made
            for r in last:
                values[r] = None
        return [values[r] for r in returned]

    from dynaflow.runtime.program import Unit

    return Unit(composed, tuple(args), outs)
