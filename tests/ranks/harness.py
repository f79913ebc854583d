"""Real ranks: `run(body, 2)` calls `body` in two processes that share a gloo group, and returns what they returned.

A rank that raises, dies or does not end in time fails the run: all that is left is ended, and the error holds every rank's traceback,
or where it was stuck. `start` is the same without a verdict, for tests in which a rank is meant to die.

The store is the parent's, as under torchrun: it outlives every rank. Processes are forked from a server that has imported torch.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# how long a collective may take before gloo gives up on the others
GROUP_LIMIT_S = 30
TIME_LIMIT_S = 120


@dataclass
class Outcome:
    """How one rank ended."""

    rank: int
    # what the body returned
    value: Any = None
    # its traceback; or where it was when its time was over
    error: str = ""
    # negative: the signal that ended it
    exitcode: int | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ended with {self.exitcode}\n{self.error}".rstrip()


def run(body: Callable[..., Any], num_ranks: int, *args: Any, time_limit_s: float = TIME_LIMIT_S) -> list[Any]:
    """What `body(*args)` returned on each rank: no tensors, whose memory may go with the rank before they are read. It is a function of a
    module, so that another process can find it."""
    outcomes = start(body, num_ranks, *args, time_limit_s=time_limit_s)
    bad = [outcome for outcome in outcomes if outcome.error or outcome.exitcode]
    assert not bad, f"{len(bad)} of {num_ranks} ranks failed in {body.__name__}\n" + "\n".join(map(str, bad))
    return [outcome.value for outcome in outcomes]


def start(body: Callable[..., Any], num_ranks: int, *args: Any, time_limit_s: float = TIME_LIMIT_S) -> list[Outcome]:
    """How each rank ended. Nothing that was started is left when this returns."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.ranks.preload"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = [Outcome(rank) for rank in range(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = {}, []
        try:
            for rank in range(num_ranks):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, num_ranks, store.port, body, args, theirs, _stacks(folder, rank)))
                process.start()
                theirs.close()
                pipes[ours] = rank
                processes.append(process)
            _collect(pipes, processes, outcomes, time.monotonic() + time_limit_s)
        finally:
            _end(processes, outcomes, folder, time_limit_s)
    return outcomes


def _collect(pipes: dict[Any, int], processes: list[Any], outcomes: list[Outcome], deadline: float) -> None:
    """Results as they come in; a rank is over when its process is."""
    alive = {process.sentinel for process in processes}
    while (pipes or alive) and (left := deadline - time.monotonic()) > 0:
        for ready in wait([*pipes, *alive], left):
            if ready in alive:
                alive.remove(ready)
                continue
            try:
                outcomes[pipes[ready]].value, outcomes[pipes[ready]].error = ready.recv()
            except EOFError:  # it died without a word
                outcomes[pipes[ready]].error = outcomes[pipes[ready]].error or "said nothing"
            del pipes[ready]


def _end(processes: list[Any], outcomes: list[Outcome], folder: str, time_limit_s: float) -> None:
    stuck = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in stuck:
        os.kill(processes[rank].pid, signal.SIGUSR1)  # say where you are
    time.sleep(0.5 * bool(stuck))
    for rank, process in enumerate(processes):
        process.kill()
        process.join()
        outcomes[rank].exitcode = process.exitcode
        if rank in stuck:
            with open(_stacks(folder, rank)) as file:
                outcomes[rank].error += f"\nstill there after {time_limit_s} s:\n{file.read()}"


def _stacks(folder: str, rank: int) -> str:
    return os.path.join(folder, f"stacks-{rank}.txt")


def _rank(rank: int, num_ranks: int, port: int, body: Callable[..., Any], args: Any, pipe: Any, stacks: str) -> None:
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks), GLOO_SOCKET_IFNAME="lo")
        torch.set_num_threads(1)
        try:
            store = dist.TCPStore("127.0.0.1", port, is_master=False)
            limit = timedelta(seconds=GROUP_LIMIT_S)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
            # a rank that is done at once must not be gone while another still connects to it
            store.set(f"connected {rank}", "")
            store.wait([f"connected {other}" for other in range(num_ranks)], limit)
            with torch.no_grad():
                value = body(*args)
            dist.destroy_process_group()
            pipe.send((value, ""))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
        pipe.close()
        atexit._run_exitfuncs()  # a process that was forked leaves without; a user's does not, and its lanes must end
