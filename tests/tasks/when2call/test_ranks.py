"""Two ranks with batches of two do what one rank does with batches of four; gloo, on the CPU.

The reference policy is the model with its adapters off, so every step turns adapters off and on
again under DDP, which must still average their gradients.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tasks.when2call.two_ranks import fit

ROOT = Path(__file__).parents[3]


def test_two_ranks_train_as_one(language_model_folder, when2call_files, tmp_path) -> None:
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
    }
    environment.pop("PL_GLOBAL_SEED", None)
    arguments = [str(language_model_folder), json.dumps(when2call_files), str(tmp_path)]
    command = [sys.executable, "-m", "tests.tasks.when2call.two_ranks", *arguments]
    logs = [tmp_path / f"rank{rank}.log" for rank in range(2)]
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
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)

    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    alone = fit(str(language_model_folder), when2call_files, tmp_path, ranks=1)
    for name, weight in first["adapters"].items():
        assert torch.equal(weight, second["adapters"][name])
        torch.testing.assert_close(weight, alone["adapters"][name], atol=1e-4, rtol=0)
    assert any(
        weight.abs().max() > 1e-4 for n, weight in first["adapters"].items() if "lora_B" in n
    )
    for name, multipliers in alone["multipliers"].items():
        assert multipliers.max() > 0
        torch.testing.assert_close(first["multipliers"][name], multipliers, atol=1e-3, rtol=1e-3)
        assert torch.equal(first["multipliers"][name], second["multipliers"][name])
    assert first["figures"].keys() == alone["figures"].keys()
    for name in ("mcq/macro_f1", "test/kl", "train/rejected/cvar95", "train/pairwise_accuracy"):
        assert first["figures"][name] == pytest.approx(alone["figures"][name], abs=1e-3)
