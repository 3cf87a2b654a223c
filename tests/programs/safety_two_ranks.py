"""A small fit of safety on the tiny Llama, on two ranks beside one; see test_module.py.

Its batches are of two prompts over all ranks, and the test generates answers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks import Generation, Lora, Policy, SafetyDataModule, SafetyModule
from pl_pointwise.tasks.safety.module import SafetyEvaluation
from tests.pl_pointwise import toy
from tests.programs.launch import on_ranks, run_on_ranks


def fit(model: str, files: dict[str, Any], root: Path, ranks: int) -> dict[str, Any]:
    """Multipliers, adapters and evaluation metrics after two epochs."""
    torch.set_num_threads(1)
    seed_everything(0)
    generation = Generation(max_new_tokens=4)
    module = SafetyModule(
        Policy(model, lora=Lora(lora_dropout=0.0), generation=generation),
        formulation=Pointwise(alpha=1.0, dual_lr=0.5),
        comply_tolerance=-6.5,
        evaluation=SafetyEvaluation(answer_in=["test"]),
        training=Training(Optimization(learning_rate=1e-3), gradient_clip_val=1.0),
    )
    sizes = {"batch_size": 2 // ranks, "eval_batch_size": 4 // ranks}
    data = SafetyDataModule(source="files", unsafe_schema="labelled", **sizes, **files)
    trainer = toy.trainer(max_epochs=2, default_root_dir=root, **on_ranks(ranks))
    trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    trained = {
        n: p.detach().clone() for n, p in module.named_parameters() if p.requires_grad
    }
    return {
        "multipliers": {name: module.multipliers[name] for name in module.constraints},
        "adapters": trained,
        "metrics": {
            name: float(value) for name, value in trainer.callback_metrics.items()
        },
    }


def two_and_one(
    model: Path, files: dict[str, str], folders: tuple[Path, Path]
) -> tuple[dict[str, float], dict[str, float]]:
    """The metrics of two ranks and of one, whose weights and multipliers have to agree."""
    arguments = [str(model), json.dumps(files), str(folders[0])]
    run_on_ranks(2, __name__, arguments, folders[0])
    first, second = (torch.load(folders[0] / f"rank{rank}.pt") for rank in range(2))
    alone = fit(str(model), files, folders[1], ranks=1)
    for name, weight in first["adapters"].items():
        assert torch.equal(weight, second["adapters"][name])
        torch.testing.assert_close(weight, alone["adapters"][name], atol=1e-4, rtol=0)
    moved = [w.abs().max() for name, w in first["adapters"].items() if "lora_B" in name]
    assert max(moved) > 1e-4
    for name, multipliers in alone["multipliers"].items():
        assert multipliers.max() > 0
        torch.testing.assert_close(
            first["multipliers"][name], multipliers, atol=1e-3, rtol=1e-3
        )
        assert torch.equal(first["multipliers"][name], second["multipliers"][name])
    assert first["metrics"].keys() == alone["metrics"].keys()
    return first["metrics"], alone["metrics"]


if __name__ == "__main__":
    model, files, root = sys.argv[1:]
    found = fit(model, json.loads(files), Path(root), ranks=2)
    torch.save(found, Path(root) / f"rank{os.environ['RANK']}.pt")
