"""Starts a module on two gloo ranks, as torchrun would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_on_two_ranks(
    module: str, arguments: Sequence[str], folder: Path, timeout: float = 250
) -> None:
    """Runs ``python -m module arguments`` on both ranks; fails with their logs if one fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "two-ranks",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    environment.pop("PL_GLOBAL_SEED", None)  # An earlier test's, which orders would follow.
    command = [sys.executable, "-m", module, *arguments]
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
