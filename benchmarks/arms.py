"""What the benchmarks that train several arms over several seeds share: a quiet trainer, the loop.

An arm is one way to train; its run at one seed is kept as a file, and not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from lightning.pytorch import Trainer

Result = dict[str, Any]


def parser_of(description: str | None, arms: Sequence[str], epochs: int) -> argparse.ArgumentParser:
    """The options that they share."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="what was run is kept here")
    parser.add_argument("--arms", nargs="+", choices=arms, default=list(arms))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=epochs)
    return parser


def quiet_trainer(folder: Path, epochs: int) -> Trainer:
    """bf16 on the CPU, and nothing written but what the module writes."""
    return Trainer(
        accelerator="cpu",
        precision="bf16-mixed",
        max_epochs=epochs,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def run_all(
    arguments: argparse.Namespace, measure: Callable[[str, int], Result], columns: Mapping[str, str]
) -> list[Result]:
    """Runs, or reads, every arm at every seed; measure(arm, seed) returns ``metrics`` and more."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in arguments.seeds:
        for arm in arguments.arms:
            path = arguments.output / f"{arm}-{seed}.json"
            if not path.is_file():
                path.write_text(json.dumps(measure(arm, seed), indent=1))
            results.append(json.loads(path.read_text()))
            found = results[-1]["metrics"]
            shown = {name: round(found[key], 3) for name, key in columns.items() if key in found}
            print(arm, seed, results[-1]["seconds"], "s", shown, flush=True)
    return results


def print_arms(arms: Sequence[str], results: list[Result], columns: Mapping[str, str]) -> None:
    """The table: mean over the seeds (smallest–largest)."""
    print(f"| arm | seeds | s | {' | '.join(columns)} |\n|---|---|---|{'---|' * len(columns)}")
    for arm in arms:
        of_arm = [row for row in results if row["arm"] == arm]
        if of_arm:
            values = [
                [row["metrics"].get(key, float("nan")) for row in of_arm]
                for key in columns.values()
            ]
            cells = [f"{mean(each):.2f} ({min(each):.2f}–{max(each):.2f})" for each in values]
            seconds = mean(row["seconds"] for row in of_arm)
            print(f"| {arm} | {len(of_arm)} | {seconds:.0f} | {' | '.join(cells)} |", flush=True)
