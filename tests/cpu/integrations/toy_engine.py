"""A serving engine that is made up: a model whose attention looks at a cache of a request's earlier tokens, which is no argument of it."""

import logging
from contextlib import contextmanager

import numpy as np
import torch

import dynaflow as df
from dynaflow.integrations.ops import tell_split_rules
from dynaflow.integrations.serving import Engine, Options
from dynaflow.integrations.steps import Steps

WIDTH = 4
# the rows that the model is called on, what they are in the engine's cache, where requests begin, and whose rows one of them reads
STATE = {"rows": (0, 0), "cache": torch.zeros(0, WIDTH), "starts": [0], "reads": {}}


@torch.library.custom_op("dynaflow_toy::attend", mutates_args=())
def attend(x: torch.Tensor) -> torch.Tensor:
    """Each token sees the sum of its request's up to itself, and of all of the request that its own one reads."""
    (start, stop), cache, starts = STATE["rows"], STATE["cache"], STATE["starts"]
    assert x.shape[0] == stop - start, "a part runs under another one's context"
    cache[start:stop] = x
    seen = torch.empty_like(cache)
    for request, (first, end) in enumerate(zip(starts, [*starts[1:], len(cache)])):
        seen[first:end] = cache[first:end].cumsum(0)
        if (other := STATE["reads"].get(request)) is not None:
            seen[first:end] += cache[starts[other] : starts[other + 1]].sum(0)
    return seen[start:stop].contiguous()


@attend.register_fake
def _(x):
    return torch.empty_like(x)


class ToyModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = torch.nn.Embedding(64, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        return self.out(torch.ops.dynaflow_toy.attend(self.embed(ids)))


class ToySteps(Steps):
    """An engine that pads its steps to multiples of 8. `lengths`: tokens per request of the step to come."""

    own_state = "kv:*"

    def __init__(self, strategy=None, min_tokens=8, is_auto=False, model=None, runtime="serial"):
        tell_split_rules(["dynaflow_toy.attend", "dynaflow_toy.of_another_build"], uses=lambda call: ["kv:toy"])
        self.model, self.lengths, self.prefix, self.has_graph = model or ToyModel(), [], [], False
        self.reads = {}
        # what it was asked, in order
        self.asked = []
        options = Options(strategy or df.TwoBatch(), min_tokens, "eager", runtime, is_auto, is_branches=False)
        super().__init__(Engine("Toy", logging.getLogger("toy")), options, self.model, batch={"ids": 0})

    def serve(self, *lengths):
        """A step; its result must be what the model computes on the tokens as a whole."""
        self.lengths, num_tokens = lengths, sum(lengths)
        padded = -(-num_tokens // 8) * 8
        ids = torch.arange(padded) % 64
        starts = [int(n) for n in np.cumsum([0, *lengths])]
        STATE.update(rows=(0, padded), cache=torch.zeros(padded, WIDTH), starts=starts, reads=self.reads)
        with torch.no_grad():
            result = self.step(num_tokens, ids)[:num_tokens]
            STATE["cache"].zero_()
            torch.testing.assert_close(result, self.model(ids)[:num_tokens])
        return self.engine.stats

    def why_whole(self, ids):
        self.asked.append("why_whole")
        return "Toy has a graph for it" if self.has_graph else ""

    def starts(self):
        self.asked.append("starts")
        return np.cumsum([0, *self.lengths])

    def tables(self):
        self.asked.append("tables")
        return self.prefix

    def in_parts(self, num_tokens, ids):
        self.asked.append("in_parts")
        whole, STATE["rows"] = STATE["rows"], (0, num_tokens)
        try:
            return self.fast(ids[:num_tokens])
        finally:
            STATE["rows"] = whole

    def whole(self, ids):
        self.asked.append("whole")
        return self.model(ids)

    def contexts(self, parts):
        self.parts = [(part.start, part.stop, self.requests_of(part)) for part in parts]
        return [_on(part.start, part.stop) for part in parts]

    def group(self):
        return None


@contextmanager
def _on(start, stop):
    before, STATE["rows"] = STATE["rows"], (start, stop)
    try:
        yield
    finally:
        STATE["rows"] = before
