"""Runs in worker processes, each of one thread, one run after another in a process."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

from pl_pointwise.compare.runs import Run

Execute = Callable[[Run], object]


def run_all(
    runs: Sequence[Run],
    workers: int,
    deadline: float | None = None,
    execute: Execute | None = None,
) -> bool:
    """Executes what is not finished, in order, several at once.

    deadline: after this time (as of ``time.time()``) no run is started.
    execute: what runs one; by default that of ``pl-pointwise compare``.
    Returns: whether every run was started; those that failed say why.
    """
    # One run may stand under several budgets.
    waiting = list({run.folder: run for run in runs if not run.finished}.values())
    if len(waiting) < len(runs):
        print(
            f"{len(runs) - len(waiting)} of {len(runs)} runs are finished", flush=True
        )
    if not waiting:
        return True
    if workers == 1:
        if execute is None:
            _prepare()
        for number, run in enumerate(waiting, start=1):
            if not _say(run, _one(run, deadline, execute), number, len(waiting)):
                return False
        return True
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker imports torch
    context = multiprocessing.get_context("spawn")
    started = True
    pool = ProcessPoolExecutor(
        workers, context, initializer=None if execute else _prepare
    )
    try:
        futures = {pool.submit(_one, run, deadline, execute): run for run in waiting}
        for number, future in enumerate(as_completed(futures), start=1):
            started &= _say(futures[future], future.result(), number, len(waiting))
    except BaseException:
        # Lightning outlives SIGTERM until the run ends; a killed run is simply run again.
        for child in multiprocessing.active_children():
            child.kill()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return started


def _prepare() -> None:
    import torch

    from pl_pointwise.printing import quieten

    torch.set_num_threads(1)
    quieten()


def _one(run: Run, deadline: float | None, execute: Execute | None) -> float | None:
    """Executes one run and returns its seconds, None if it is too late to start it."""
    if deadline is not None and time.time() > deadline:
        return None
    if execute is None:
        from pl_pointwise.compare.execution import execute as execute_run

        execute = execute_run
    started = time.perf_counter()
    execute(run)
    return time.perf_counter() - started


def _say(run: Run, seconds: float | None, number: int, total: int) -> bool:
    """Says how a run ended; returns whether it was started."""
    if seconds is None:
        return False
    result = run.result() or {}
    ended = f"failed: {result['error']}" if "error" in result else f"{seconds:.0f} s"
    print(f"[{number}/{total}] {run.title}: {ended}", flush=True)
    return True
