"""A made-up driver for copies that are part of a recording: it copies when it is replayed."""

import ctypes

from dynaflow.runtime import feeds
from dynaflow.runtime.driver import DriverError


class Machine:
    """A graph with the copies that were launched while it was captured. Their parameters are set as the driver's are: by value."""

    def __init__(self):
        self.captured, self.nodes, self.refuses, self.num_set = [], {}, False, 0
        self._set = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(self._set_params)
        self.set_params = ctypes.cast(self._set, ctypes.c_void_p).value

    def function(self, unit):
        return unit

    @staticmethod
    def words(kernel):
        pointers = (ctypes.c_void_p * 3).from_address(kernel.params)
        return kernel.function, *[ctypes.c_uint64.from_address(p).value for p in pointers]

    def launch(self, kernel):
        self.captured.append(self.words(kernel))

    def find(self, graph, copies):
        if graph is None:
            raise DriverError("no such nodes")
        self.nodes = dict(enumerate(self.captured, 1))
        by_target = {target: node for node, (_, _, target, _) in self.nodes.items()}
        return 77, [by_target[copy.slot.address] for copy in copies]

    def _set_params(self, graph, node, params):
        assert graph == 77
        self.num_set += 1
        if self.refuses:
            return 1
        self.nodes[node] = self.words(feeds.Kernel.from_address(params))
        return 0

    def replay(self):
        for unit, source, target, count in self.nodes.values():
            assert source % unit == target % unit == 0
            ctypes.memmove(target, source, unit * count)
