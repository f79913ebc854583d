from dynaflow.strategies.nano_batch import NanoBatch


class TwoBatch(NanoBatch):
    """Two parts in turn: while one computes, the other's network op runs.

    compute | A0 A1 B0 B1 C0 C1 ...
    comm    |    a0 a1 b0 b1 c0 ...
    """

    def __init__(self, min_batch_size: int = 2):
        super().__init__(2, min_batch_size)
