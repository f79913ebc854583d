"""A row is a process: several load side by side, one after another is timed, none runs past the limit.

A process that is ended keeps what it has written. What was not run, ended or failed is said.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import fresh, turn
from benchmarks.store import Result, load, publish
from benchmarks.variants import NOT_MEASURED

# with less than this left no process is started: it would not get past its imports and its model
MIN_ROW_S = 20.0
# a process that waits for its turn for so long does not wait for others to load: these are held meanwhile
PATIENCE_S = 60.0
TAIL_LINES = 12


def slug(row: str) -> str:
    """A row's name as part of a file's."""
    return re.sub(r"[^a-z0-9_]+", "-", row.lower()).strip("-")


@dataclass(frozen=True)
class Job:
    """What a process is to do, and for which row. One of a phase that is timed takes its turn."""

    phase: str
    row: str
    wish: Mapping[str, Any]


@dataclass
class Done:
    phase: str
    row: str
    seconds: float
    # of the process; None where it was ended
    rc: int | None
    # what it could not measure, and the end of what it said
    missing: list[str]
    tail: str
    # what it wrote, where it was asked to
    json: Path


@dataclass
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    log: Path
    json: Path
    # where turns are given out
    place: Path
    began: float = field(default_factory=time.perf_counter)
    # what it did until it was ready, without what it waited for; when that was
    loaded_s: float | None = None
    ready_at: float | None = None
    turn_began: float | None = None
    # since when it is held
    held_at: float | None = None

    def seconds(self) -> float:
        """At work: what it waited for its turn, and for others', does not count."""
        now = time.perf_counter()
        if self.turn_began is not None:
            return (self.loaded_s or 0.0) + now - self.turn_began
        return (self.held_at or now) - self.began if self.loaded_s is None else self.loaded_s

    def look(self) -> None:
        if self.loaded_s is None and turn.ready(self.place).exists():
            self.loaded_s = self.seconds()
            self.ready_at = time.perf_counter()

    def is_ready(self) -> bool:
        return self.loaded_s is not None and self.turn_began is None

    def waited_s(self) -> float:
        return time.perf_counter() - self.ready_at if self.ready_at is not None else 0.0

    def give_turn(self) -> None:
        self.go_on()  # it may have become ready just before it was held
        self.turn_began = time.perf_counter()
        turn.given(self.place).touch()

    def hold(self) -> None:
        """With its compile workers. Until it has stopped, it may still get a lock that it waits for."""
        if self.held_at is None:
            self.held_at = time.perf_counter()
            _signal(self.process, signal.SIGSTOP)
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def go_on(self) -> None:
        if self.held_at is not None:
            self.began += time.perf_counter() - self.held_at
            self.held_at = None
            _signal(self.process, signal.SIGCONT)


def run(suite: str, jobs: Sequence[Job], num_jobs: int, seconds_left: Any, row_limit_s: float,
        min_row_s: float = MIN_ROW_S, in_turns: bool = False) -> Iterator[Done | Job]:  # fmt: skip
    """A Done for each job as it ends, the job itself where it was not started. `seconds_left()` is asked before every start.

    In turns: the processes of a wave load side by side, wait (`turn.take`), and go on one after another, each alone; those that never
    ask for their turn end first, or are held for as long as others have theirs. The next wave begins when the last one has ended.
    """
    waiting, running, machine = list(jobs), list[_Running](), turn.Machine()
    is_shared = False
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(2, (os.cpu_count() or 1) // num_jobs))}
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or running:
                is_full = bool(running) and in_turns
                if not running:
                    if is_shared:
                        machine.let_others()
                    is_shared = machine.try_share()  # while it is somebody's own, nothing is started
                while waiting and len(running) < num_jobs and not is_full:
                    if seconds_left() < min_row_s:
                        yield from waiting
                        waiting.clear()
                        break
                    if not is_shared:
                        break
                    running.append(_start(suite, waiting.pop(0), Path(folder), threads, in_turns))
                for each in list(running):
                    each.look()
                    if (done := _ended(each, row_limit_s, seconds_left())) is not None:
                        running.remove(each)
                        yield done
                if running and not any(each.turn_began is not None for each in running):
                    _next_turn(running, machine)
                time.sleep(0.05)
        finally:
            machine.leave()
            for each in running:
                _end(each.process)


def _next_turn(running: Sequence[_Running], machine: turn.Machine) -> None:
    """To the first that is ready, when all others are, too, or held, or when one has waited for long enough; those that load are held
    meanwhile."""
    ready, loading = [each for each in running if each.is_ready()], [each for each in running if not each.is_ready()]
    is_quiet = all(each.held_at is not None for each in loading)
    is_time = bool(ready) and (is_quiet or max(each.waited_s() for each in ready) >= PATIENCE_S)
    if is_time and machine.try_own():
        with turn.nobody_tunes() as is_free:  # a lock that somebody holds who is held himself, nobody would get
            if is_free:
                for each in loading:
                    each.hold()
                ready[0].give_turn()
    elif not ready and any(each.held_at is not None for each in loading) and machine.try_share():
        for each in loading:
            each.go_on()


def _start(suite: str, job: Job, folder: Path, threads: dict[str, str], in_turns: bool) -> _Running:
    log, result, place = (folder / f"{job.phase}-{slug(job.row)}.{suffix}" for suffix in ("log", "json", "place"))
    own = {"phase": job.phase, "row": job.row, "json": str(result), "turn": str(place) if in_turns else ""}
    with log.open("wb") as out:
        process = subprocess.Popen(
            fresh.command(suite, {**job.wish, **own}), cwd=fresh.ROOT, stdout=out,
            stderr=subprocess.STDOUT, env=fresh.environment(**threads), start_new_session=True)  # fmt: skip
    return _Running(job, process, log, result, place)


def _ended(each: _Running, limit_s: float, seconds_left: float) -> Done | None:
    seconds = each.seconds()
    if each.process.poll() is None:
        if seconds < limit_s and seconds_left > 0:
            return None
        _end(each.process)
        rc = None
    else:
        rc = each.process.returncode
        _end(each.process)  # compile workers that it left
    said = each.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    missing, tail = [s for s in said if NOT_MEASURED in s], "\n".join(said[-TAIL_LINES:])
    return Done(each.job.phase, each.job.row, round(seconds, 1), rc, missing, tail, each.json)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and its own workers: it has a session of its own."""
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, what)


def add_options(parser: argparse.ArgumentParser, report: Any) -> None:
    """What every suite of rows in processes understands."""
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small models")
    parser.add_argument("--jobs", type=int, default=0, help="processes that load side by side; three for four cores")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="start nothing new that would not fit, end what runs past it")
    parser.add_argument("--row-limit-s", type=float, default=float("inf"), help="end a row's process after so many seconds")
    parser.add_argument("--json", type=lambda text: Path(text).absolute(), default=report.RESULTS)
    parser.add_argument("--page", type=Path, default=report.PAGE)
    parser.add_argument("--merge", type=Path, nargs="+", default=[])
    parser.add_argument("--plot", action="store_true", help="plot and page from the json, measure nothing")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def main(args: argparse.Namespace, suite: type[Shard], child: Callable[[str], int], listing: str, report: Any, plot: Any) -> int:
    """What a suite's command comes down to: a row's own process, a list, a page, or a shard."""
    if args.child:
        return child(args.child)
    if args.list:
        print(listing)
        return 0
    if publish(args, report, plot):
        return 0
    return suite(args).run()


def default_jobs(args: argparse.Namespace) -> int:
    return args.jobs or max(1, (os.cpu_count() or 1) * 3 // 4)


class Shard(ABC):
    """One call of a suite whose rows are processes: what ended badly, what was not run, how long it took."""

    def __init__(self, suite: str, args: argparse.Namespace):
        self.suite, self.args = suite, args
        self.began = time.perf_counter()
        self.bad: list[str] = []
        self.not_run: list[str] = []
        # ended from outside: end the rows' processes too
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    @abstractmethod
    def run(self) -> int:
        """Measure what the arguments ask for; the exit code."""

    def left_s(self) -> float:
        return float(self.args.limit_s - (time.perf_counter() - self.began))

    def each(self, jobs: Sequence[Job], num_jobs: int, min_row_s: float = MIN_ROW_S, in_turns: bool = False) -> Iterator[Done]:
        """The jobs as they end, said; what was not started is kept for the end."""
        for done in run(self.suite, jobs, num_jobs, self.left_s, self.args.row_limit_s, min_row_s, in_turns):
            if isinstance(done, Job):
                self.not_run.append(f"{done.phase}: {done.row}")
                continue
            how = "ended" if done.rc is None else "ok" if done.rc == 0 else f"failed ({done.rc})"
            print(f"{done.phase} {done.row}: {how} after {done.seconds} s", flush=True)
            print(*done.missing, sep="\n", end="\n" * bool(done.missing), flush=True)
            if done.rc != 0:
                self.bad.append(f"{done.phase}: {done.row} {how}")
                print("    " + done.tail.replace("\n", "\n    "), flush=True)
            yield done

    def end(self, report: Any, is_timed: bool) -> int:
        """Says all that was found; the exit code: 3 where something was not run, 1 where something failed or a target is missed."""
        rows: list[Result] = load(self.args.json)
        print(f"\n{time.perf_counter() - self.began:.0f} s")
        if rows and is_timed:
            print(report.table(rows))
        for title, found in (("BAD", self.bad), (f"NOT RUN (no room in --limit-s {self.args.limit_s:.0f})", self.not_run)):
            if found:
                print(f"{title}: " + "; ".join(found))
        if self.not_run:
            return 3
        return 1 if self.bad or (is_timed and not all(t["is_met"] for t in report.targets(rows))) else 0
