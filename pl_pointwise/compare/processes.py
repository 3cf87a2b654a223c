"""Several runs at once, in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from .runner import open_folder, write_result
from .runs import Comparison, Run

Process = subprocess.Popen[bytes]


def execute_in_processes(comparison: Comparison, numbers: Sequence[int], jobs: int) -> None:
    """Runs these, by number from 1, each in its own process; whatever ends this one ends them."""
    runs, waiting = comparison.runs, list(numbers)
    running: dict[int, tuple[int, Process]] = {}  # By slot.
    # As an exception, so that the ``finally`` is reached.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        while waiting or running:
            for slot in set(range(jobs)) - set(running):
                if waiting:
                    number = waiting.pop(0)
                    print(f"[{number}/{len(runs)}] {runs[number - 1].title}", flush=True)
                    running[slot] = number, _start(comparison, number, jobs, slot)
            time.sleep(0.05)
            for slot, (number, process) in list(running.items()):
                if process.poll() is not None:
                    del running[slot]
                    run, end = runs[number - 1], "failed" if process.returncode else "done"
                    if process.returncode and run.result() is None:  # Else it says itself why.
                        write_result(run, {"digest": run.digest, "error": _end(run, process)})
                    print(f"[{number}/{len(runs)}] {run.title}: {end}", flush=True)
    finally:
        _stop([process for _, process in running.values()])
        signal.signal(signal.SIGTERM, before)


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
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        while any(p.poll() is None for p in processes) and time.monotonic() < deadline:
            time.sleep(0.05)
