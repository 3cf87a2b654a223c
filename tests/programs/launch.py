"""Starts a module on gloo ranks, as torchrun would; or forks, where importing takes the longest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_on_ranks(
    ranks: int, module: str, arguments: Sequence[str], folder: Path, timeout: float = 250
) -> None:
    """Runs ``python -m module arguments`` on every rank; fails with their logs if one fails."""
    environments = rank_environments(ranks)
    command = [sys.executable, "-m", module, *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited(), **environment},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for environment, log in zip(environments, logs, strict=True)
    ]
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in logs)


def run_program(module: str, arguments: Sequence[str], timeout: float = 250) -> None:
    """Runs ``python -m module arguments``, which forks what it needs; fails with its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=inherited(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stdout[-5000:]


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
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


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
    codes = [finished(child) for child in children]  # All of them, whatever the first ends with.
    if any(codes):
        raise SystemExit("\n".join(log.read_text()[-3000:] for log in logs))
