"""Which launch happens before which: reachability in the graph of steps. Knows nothing of clocks."""

from dynaflow.ir import Launch, Plan, Record, Wait


def happens_before(plan: Plan) -> set[tuple[int, int]]:
    """Pairs of launches, by their numbers in host order. A wait for what is not recorded yet orders nothing."""
    after: list[list[int]] = [[] for _ in plan.steps]
    last: dict[str, int] = {}
    recorded: dict[str, int] = {}
    for at, step in enumerate(plan.steps):
        if step.stream in last:
            after[last[step.stream]].append(at)
        last[step.stream] = at
        if type(step) is Record:
            recorded[step.event] = at
        elif type(step) is Wait and step.event in recorded:
            after[recorded[step.event]].append(at)
    number = {at: n for n, at in enumerate(at for at, step in enumerate(plan.steps) if type(step) is Launch)}
    pairs = set()
    for at in number:
        seen, ahead = set(), [at]
        while ahead:
            for other in after[ahead.pop()]:
                if other not in seen:
                    seen.add(other)
                    ahead.append(other)
        pairs |= {(number[at], number[other]) for other in seen if other in number}
    return pairs
