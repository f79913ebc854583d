from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Confined:
    """Ops that run on few of a plan's streams, the caller's first: memory is kept for every stream that they run on."""

    # (ops, streams that they may run on)
    groups: tuple[tuple[frozenset[str], int], ...] = ()

    def lanes(self, op: str, lanes: list[str]) -> list[str]:
        """Those of the lanes, which are in a fixed order, that it may run on."""
        return lanes[: max(1, min((count for ops, count in self.groups if op in ops), default=len(lanes)))]

    def __repr__(self) -> str:
        return f"<{', '.join(f'{len(ops)} ops on {count} streams' for ops, count in self.groups) or 'nothing'}>"


NOTHING = Confined()
