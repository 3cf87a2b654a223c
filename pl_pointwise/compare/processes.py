"""Several runs at once, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from .runner import open_folder, reason, write_result
from .runs import Comparison, Run

Process = subprocess.Popen[bytes]


def execute_in_processes(comparison: Comparison, numbers: Sequence[int], jobs: int) -> None:
    """Runs these, by number from 1, each in its own process; whatever ends this one ends them."""
    runs, waiting, free = comparison.runs, list(numbers), list(range(jobs))
    running: dict[Process, tuple[int, int]] = {}

    def tell(number: int, text: str = "") -> None:
        print(f"[{number}/{len(runs)}] {runs[number - 1].title}{text}", flush=True)

    with _sigterm_raises():
        try:
            while waiting or running:
                while waiting and free:
                    number, slot = waiting.pop(0), free.pop(0)
                    tell(number)
                    try:
                        running[_start(comparison, number, jobs, slot)] = (number, slot)
                    except OSError as error:  # No room for its log.
                        tell(number, f": failed: {reason(runs[number - 1], error)}")
                        free.append(slot)
                time.sleep(0.05)
                for process in [p for p in running if p.poll() is not None]:
                    number, slot = running.pop(process)
                    free.append(slot)
                    run = runs[number - 1]
                    if process.returncode and run.result() is None:
                        with suppress(OSError):  # It says itself what it ended by.
                            write_result(run, {"digest": run.digest, "error": _end(run, process)})
                    tell(number, ": failed" if process.returncode else ": done")
        finally:
            _stop(list(running))


def _start(comparison: Comparison, number: int, jobs: int, slot: int) -> Process:
    run = comparison.runs[number - 1]
    open_folder(run)
    command = [sys.executable, "-m", "pl_pointwise", "compare", *comparison.arguments()]
    with (run.folder / "log.txt").open("wb") as file:
        return subprocess.Popen(
            [*command, "--only", str(number)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **_share(jobs, slot)},
            start_new_session=True,
        )


def _share(jobs: int, slot: int) -> dict[str, str]:
    """Returns the environment by which a process takes its share of cores and GPUs and no more."""
    share = {}
    if "OMP_NUM_THREADS" not in os.environ:
        share["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // jobs))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    if gpus == [""]:
        gpus = [str(device) for device in range(torch.cuda.device_count())]
    if len(gpus) > 1 and jobs > 1:
        mine = gpus[slot::jobs] or [gpus[slot % len(gpus)]]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return share


def _end(run: Run, process: Process) -> str:
    """Returns the error of a process that ended without one."""
    code = process.returncode
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    hint = " Out of memory, perhaps." if code == -signal.SIGKILL else ""
    return f"The process of this run ended {how}.{hint} See {run.folder / 'log.txt'}."


def _stop(processes: Sequence[Process], patience: float = 10.0) -> None:
    """Ends processes and what they started, whose group each leads: asks, waits, then kills."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()


def _signal(process: Process, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM ends the block as an exception would, so that its ``finally`` is reached."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python hands signals to the main thread alone.
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
