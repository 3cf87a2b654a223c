"""Two machines, as torchrun and SLURM start them, train as one process: what docs/devices.md says.

Both machines are this one. SLURM itself is not here; the variables that srun sets are.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.launch import ROOT, inherited

pytestmark = pytest.mark.slow

TRAINING = ["fit", "--model", "tests.pl_pointwise.line_task.LineModule"]
TRAINING += [
    "--data",
    "tests.pl_pointwise.line_task.LineData",
    "--trainer.accelerator",
    "cpu",
]
TRAINING += ["--trainer.max_epochs", "3", "--trainer.logger", "false"]
TRAINING += ["--trainer.enable_progress_bar", "false"]
TRAINING += ["--model.formulation", "Pointwise", "--model.formulation.alpha", "2.0"]
SEVERAL = [
    "--trainer.num_nodes",
    "2",
    "--trainer.devices",
    "1",
    "--trainer.strategy",
    "ddp",
]


def run(
    commands: list[list[str]], environments: list[dict[str, str]], folder: Path
) -> Any:
    """What the checkpoint holds that the processes wrote together."""
    folder.mkdir()
    processes = [
        subprocess.Popen(
            [*command, "--trainer.default_root_dir", str(folder)],
            cwd=ROOT,
            env={**inherited(), **environment},
            stdout=(folder / f"{number}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for number, (command, environment) in enumerate(
            zip(commands, environments, strict=True)
        )
    ]
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(codes), "\n".join(
        log.read_text()[-3000:] for log in folder.glob("*.log")
    )
    (checkpoint,) = folder.rglob("*.ckpt")
    return torch.load(checkpoint, weights_only=True)


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def torchrun() -> tuple[list[list[str]], list[dict[str, str]]]:
    port = free_port()
    commands = []
    for node in range(2):
        agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"]
        agent += ["--node-rank", str(node), "--nproc-per-node", "1"]
        agent += ["--master-addr", "127.0.0.1", "--master-port", port]
        commands.append(
            [*agent, "-m", "pl_pointwise", *TRAINING, *SEVERAL, "--data.batch_size=2"]
        )
    return commands, [{}, {}]


def slurm() -> tuple[list[list[str]], list[dict[str, str]]]:
    shared = {
        "SLURM_JOB_ID": "1234",
        "SLURM_JOB_NAME": "training",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_NNODES": "2",
        "SLURM_NODELIST": "127.0.0.1",
        "SLURM_LOCALID": "0",
        "MASTER_PORT": free_port(),
    }
    command = [
        sys.executable,
        "-m",
        "pl_pointwise",
        *TRAINING,
        *SEVERAL,
        "--data.batch_size=2",
    ]
    ranks = [
        {**shared, "SLURM_PROCID": str(r), "SLURM_NODEID": str(r)} for r in range(2)
    ]
    return [command, command], ranks


@pytest.mark.parametrize("launcher", [torchrun, slurm])
def test_two_machines_equal_one_process(launcher: Any, tmp_path: Path) -> None:
    one = [sys.executable, "-m", "pl_pointwise", *TRAINING, "--data.batch_size=4"]
    expected = run([one], [{}], tmp_path / "one")
    found = run(*launcher(), tmp_path / "two")
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][name], value, rtol=0, atol=1e-6)
    table = expected["pl_pointwise"]["multipliers"]["fit"]
    torch.testing.assert_close(found["pl_pointwise"]["multipliers"]["fit"], table)
    assert table.max() > 0
    assert found["global_step"] == expected["global_step"] == 6
