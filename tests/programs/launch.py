"""Starts a module on gloo ranks, as torchrun would; or forks, where importing takes the longest."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

ROOT = Path(__file__).resolve().parents[2]


def on_ranks(ranks: int) -> dict[str, Any]:
    """A trainer's options for so many processes."""
    if ranks == 1:
        return {}
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    return {"devices": ranks, "strategy": strategy}


def run_on_ranks(
    ranks: int,
    module: str,
    arguments: Sequence[str],
    folder: Path,
    timeout: float = 250,
) -> None:
    """Runs ``python -m module arguments`` on every rank; fails with their logs if one fails.

    With no ranks once, for a program that forks them.
    """
    environments = rank_environments(ranks) or [{}]
    names = [f"rank{rank}" for rank in range(ranks)] or ["program"]
    logs = [folder / f"{name}.log" for name in names]
    processes = [
        preloaded().Process(target=_as_main, args=(module, arguments, environment, log))
        for environment, log in zip(environments, logs, strict=True)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    try:
        for process in processes:
            process.join(max(0.0, end - time.monotonic()))
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(code != 0 for code in codes), "\n".join(
        f"exit code {code}\n{log.read_text()[-5000:]}"
        for code, log in zip(codes, logs, strict=True)
    )


@cache
def preloaded() -> ForkServerContext:
    """Processes forked from one that has imported what takes ten seconds, and done nothing else."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["pl_pointwise.tasks", "pl_pointwise.callbacks", "peft"]
    )
    before = dict(os.environ)
    os.environ.update(inherited())
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _as_main(
    module: str, arguments: Sequence[str], more: dict[str, str], log: Path
) -> None:
    """What ``python -m`` does, with this environment on top, and its output in ``log``."""
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(more)
    # Of a new process, for its own children.
    multiprocessing.set_start_method(None, force=True)
    os.chdir(ROOT)
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # A child of multiprocessing ends without them.


def inherited() -> dict[str, str]:
    """This process's environment, without what an earlier test left there."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment.pop("PL_GLOBAL_SEED", None)  # The orders of samples would follow it.
    return environment


def rank_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets, by rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "tests",
    }
    return [
        {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)
    ]


def forked(act: Callable[[], Any], log: Path) -> int:
    """The id of a new process that does one thing, with its output in ``log``.

    To be called by a program that has not used autograd: a fork of one that has cannot.
    """
    child = os.fork()
    if child:
        return child
    code = 1
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            act()
            code = 0
        except SystemExit as exit_:
            code = int(exit_.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def finished(child: int) -> int:
    """The exit code of a forked process, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def fork_ranks(ranks: int, act: Callable[[], Any], folder: Path) -> None:
    """Does one thing on every rank, in forked processes; ends with their logs if one fails."""
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]

    def on_rank(environment: dict[str, str]) -> None:
        os.environ.update(environment)
        act()

    children = [
        forked(lambda environment=environment: on_rank(environment), log)
        for environment, log in zip(rank_environments(ranks), logs, strict=True)
    ]
    # All of them, whatever the first ends with.
    codes = [finished(child) for child in children]
    if any(codes):
        raise SystemExit("\n".join(log.read_text()[-3000:] for log in logs))
