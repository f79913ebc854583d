"""Two ranks on this machine, over gloo: a tensor-parallel model whose all-reduces run while the other half of the batch computes.

The model is plain PyTorch. Ranks agree on the order of their messages before the first one is sent. A link of 2 ms is emulated: on one
machine, messages are too fast for anything to be seen.
"""

import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import dynaflow as df


@torch.library.custom_op("examples::link", mutates_args=())
def link(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return x.clone()


link.register_fake(torch.empty_like)
df.register_split_rule(torch.ops.examples.link.default, df.rowwise)


class Block(nn.Module):
    """This rank's columns of `up` and rows of `down`."""

    def __init__(self, up, down):
        super().__init__()
        rank, world = dist.get_rank(), dist.get_world_size()
        self.up, self.down = (nn.Parameter(w.chunk(world, dim)[rank].clone()) for w, dim in ((up, 0), (down, 1)))

    def forward(self, x):
        y = torch.relu(x @ self.up.t()) @ self.down.t()
        with df.mark("send", kind="network"):
            y = link(y)
            dist.all_reduce(y)
        return x + y


def main(rank, world, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    weights = [(torch.randn(1024, 256) / 16, torch.randn(256, 1024) / 32) for _ in range(4)]
    model = nn.Sequential(*(Block(up, down) for up, down in weights))
    x = torch.randn(512, 256)

    wanted = x
    for up, down in weights:  # one process, all weights
        wanted = wanted + torch.relu(wanted @ up.t()) @ down.t()
    for strategy in (df.Sequential(), df.TwoBatch()):
        fast = df.compile(model, strategy=strategy, strict=True)
        torch.testing.assert_close(fast(x), wanted, rtol=1e-4, atol=1e-4)
    with df.profile() as profiled:
        fast(x)
    if rank == 0:
        print(profiled.timeline)
        hidden = profiled.timeline.hidden_share("comm")
        print(f"rank 0: {hidden:.0%} of the time in all-reduces was spent computing as well (link emulated)")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(main, (2, port), nprocs=2)
    print("equal to plain PyTorch on every rank")
