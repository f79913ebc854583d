from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Confined:
    """Ops that run on few of a plan's streams, the caller's first: libraries keep memory for every stream that theirs run on."""

    ops: frozenset[str]
    num_streams: int

    def lanes(self, op: str, lanes: list[str]) -> list[str]:
        """Those of the lanes, which are in a fixed order, that it may run on."""
        return lanes[: max(1, self.num_streams)] if op in self.ops else lanes

    def __repr__(self) -> str:
        return f"<{len(self.ops)} ops on {self.num_streams} streams>"


NOTHING = Confined(frozenset(), 1)
