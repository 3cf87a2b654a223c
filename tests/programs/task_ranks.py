"""A fit of a language task on two ranks beside the same fit on one.

A task's ``two_ranks.py`` builds module and data, and calls :func:`main` when it is run as a rank.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy

from pl_pointwise import PointwiseModule
from tests.programs.launch import run_on_ranks

Build = Callable[[str, dict[str, str], int], tuple[PointwiseModule, LightningDataModule]]
"""Module and data of (model, files, ranks), the batch of all ranks together always the same."""


def fit(build: Build, model: str, files: dict[str, str], root: Path, ranks: int) -> dict[str, Any]:
    """Multipliers, adapters and evaluation metrics after two epochs."""
    torch.set_num_threads(1)
    seed_everything(0)
    module, data = build(model, files, ranks)
    ddp = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=60))
    trainer = Trainer(
        devices=ranks,
        strategy="auto" if ranks == 1 else ddp,
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=root,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    trained = {n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad}
    return {
        "multipliers": {name: module.multipliers[name] for name in module.constraints},
        "adapters": trained,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def main(build: Build) -> None:
    """Fit as one of two ranks, and leave the result in the folder."""
    model, files, root = sys.argv[1:]
    found = fit(build, model, json.loads(files), Path(root), ranks=2)
    torch.save(found, Path(root) / f"rank{os.environ['RANK']}.pt")


def two_and_one(
    script: ModuleType, model: Path, files: dict[str, str], folders: tuple[Path, Path]
) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of two ranks and of one, whose weights and multipliers have to agree."""
    arguments = [str(model), json.dumps(files), str(folders[0])]
    run_on_ranks(2, script.__name__, arguments, folders[0])
    first, second = (torch.load(folders[0] / f"rank{rank}.pt") for rank in range(2))
    alone = fit(script.build, str(model), files, folders[1], ranks=1)
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
    assert first["metrics"].keys() == alone["metrics"].keys()
    return first["metrics"], alone["metrics"]
