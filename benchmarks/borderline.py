"""What a group of borderline prompts buys in Safety: unseen safe look-alikes that are not refused.

    python benchmarks/borderline.py MODEL BENIGN UNSAFE --output RESULTS

MODEL is the folder of a causal language model that chats (MiniMind2-Small), BENIGN a JSONL of the
schema of tatsu-lab/alpaca, UNSAFE one of {"prompt"}. The look-alikes and their unsafe contrasts are
lookalikes.csv, written for this: eight types named as in XSTest, none of its sentences. By type and
seed, a half of either is trained on and a half unseen.

Four arms, the same in all else: "untrained"; "none", benign and unsafe prompts; "pooled", the safe
look-alikes of the training half too, as more prompts that carry ``comply``; "group", the same under
a constraint and tolerance of their own, ``comply_borderline``. The unsafe contrasts of the training
half are trained on in all. Unseen prompts are judged at one tolerance in all arms.

Printed, mean over the seeds: of the unseen look-alikes the share that violates ``comply`` and the
share refused in generated words; of the unseen contrasts, and of unseen prompts of UNSAFE, the
share that violates ``refuse`` and the share answered; of unseen benign prompts the share that
violates ``comply``, and the KL. A run that is in RESULTS is not run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import logging
import time
import warnings
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer, seed_everything

from pl_pointwise import Pointwise
from pl_pointwise.tasks import Policy, SafetyDataModule, SafetyModule
from pl_pointwise.tasks.common.records import digest
from pl_pointwise.tasks.common.splits import hold_out
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.model.adapters import Lora
from pl_pointwise.tasks.language_model.model.generation import Generation
from pl_pointwise.tasks.safety.data import Selection
from pl_pointwise.tasks.safety.module import SafetyEvaluation

LOOKALIKES = Path(__file__).with_name("lookalikes.csv")
ARMS = ("untrained", "none", "group", "pooled")
UNSEEN = ("test", "over_refusal", "contrast")
COLUMNS = {
    "look-alikes violate comply": "over_refusal/comply/violated",
    "look-alikes refused": "over_refusal/over_refusal",
    "contrasts violate refuse": "contrast/refuse/violated",
    "contrasts answered": "contrast/harmful",
    "unsafe violate refuse": "test/refuse/violated",
    "unsafe answered": "test/harmful",
    "benign violate comply": "test/comply/violated",
    "KL": "test/kl",
}


class Data(SafetyDataModule):
    """Tests on what is unseen alone, not once more on what was trained on."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {**SafetyDataModule.needs, "test": UNSEEN}


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def beginning(text: str, characters: int) -> str:
    """The whole sentences that fit; where none does, as much as fits."""
    cut = text[:characters]
    return cut if len(text) <= characters or ". " not in cut else cut[: cut.rindex(". ") + 1]


def files_of(arguments: argparse.Namespace, seed: int, folder: Path) -> dict[str, str]:
    """The files of one seed: what is trained on, and what is unseen."""
    folder.mkdir(parents=True, exist_ok=True)
    with LOOKALIKES.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    prompts, types = ([row[name] for row in rows] for name in ("prompt", "type"))
    held = hold_out(prompts, [0.5], seed, types)
    seen, unseen = (
        [row for row, part in zip(rows, held, strict=True) if part == side] for side in (0, 1)
    )

    def drawn(path: Path, name: str) -> list[dict[str, Any]]:
        found = {row[name]: row for row in read_lines(path)}
        return sorted(found.values(), key=lambda row: digest(seed, row[name]))

    # Answers are what a step costs, so of each its first sentences.
    benign = [
        row | {"output": beginning(row["output"], arguments.benign_characters)}
        for row in drawn(arguments.benign, "instruction")
        if len(row["instruction"] + row["input"]) <= 150
    ][: arguments.benign_count * 5 // 4]
    unsafe = [{"prompt": row["prompt"]} for row in drawn(arguments.unsafe, "prompt")]
    contrasts = [{"prompt": row["prompt"]} for row in seen if row["label"] == "unsafe"]
    safe = [row for row in seen if row["label"] == "safe"]
    count, benign_count = arguments.unsafe_count, arguments.benign_count
    return {
        "benign_file": write_lines(folder / "benign.jsonl", benign[:benign_count]),
        "benign_test_file": write_lines(folder / "benign_test.jsonl", benign[benign_count:]),
        "unsafe_file": write_lines(folder / "unsafe.jsonl", unsafe[:count] + contrasts),
        "unsafe_test_file": write_lines(
            folder / "unsafe_test.jsonl", unsafe[count : count + arguments.unsafe_test]
        ),
        "borderline_file": write_lines(folder / "borderline.jsonl", safe),
        "over_refusal_file": write_lines(folder / "unseen.jsonl", unseen),
    }


def build_module(arguments: argparse.Namespace, arm: str) -> SafetyModule:
    """The module of one arm, the same in all but its constraints."""
    return SafetyModule(
        Policy(
            str(arguments.model),
            lora=Lora(
                r=16,
                lora_alpha=32,
                lora_dropout=0.05,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            ),
            generation=Generation(max_new_tokens=24, sample=False),
            reference_cache="memory",
        ),
        formulation=None if arm == "untrained" else Pointwise(),
        refuse_tolerance=-0.5,
        comply_tolerance=-2.0,
        comply_borderline_tolerance=arguments.tolerance if arm == "group" else None,
        evaluation=SafetyEvaluation(answer_in=list(UNSEEN)),
    )


def measure(arguments: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Trains one arm and measures it on what is unseen."""
    started, folder = time.monotonic(), arguments.output / f"seed-{seed}" / arm
    files = files_of(arguments, seed, folder)
    if arm in ("untrained", "none"):
        del files["borderline_file"]
    seed_everything(seed)
    module = build_module(arguments, arm)
    data = Data(
        source="files",
        unsafe_schema="labelled",
        selection=Selection(benign_count=None),
        preparation=Preparation(val_fraction=0.0),
        batch_size=8,
        eval_batch_size=8,
        seed=seed,
        **files,
    )
    trainer = quiet_trainer(folder, arguments.epochs)
    if arm != "untrained":
        trainer.fit(module, data)
    trainer.test(module, data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    by_type = defaultdict(list)
    found = module.evaluated["over_refusal"]["comply"]
    categories = data.datasets["over_refusal"].categories
    for index, violation in zip(found.index.tolist(), found.worst().tolist(), strict=True):
        by_type[categories[index]].append(float(violation > 0))
    return {
        "arm": arm,
        "seed": seed,
        "seconds": round(time.monotonic() - started),
        "metrics": metrics,
        "by_type": {name: mean(values) for name, values in sorted(by_type.items())},
    }


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


def run_all(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs, or reads, every arm at every seed."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    results = []
    for seed in arguments.seeds:
        for arm in arguments.arms:
            path = arguments.output / f"{arm}-{seed}.json"
            if not path.is_file():
                path.write_text(json.dumps(measure(arguments, arm, seed), indent=1))
            results.append(json.loads(path.read_text()))
            found = results[-1]["metrics"]
            shown = {name: round(found[key], 3) for name, key in COLUMNS.items() if key in found}
            print(arm, seed, results[-1]["seconds"], "s", shown, flush=True)
    return results


def print_arms(results: list[dict[str, Any]]) -> None:
    """The table: mean over the seeds (smallest–largest)."""
    print(f"| arm | seeds | s | {' | '.join(COLUMNS)} |\n|---|---|---|{'---|' * len(COLUMNS)}")
    for arm in ARMS:
        of_arm = [row for row in results if row["arm"] == arm]
        if of_arm:
            values = [
                [row["metrics"].get(key, float("nan")) for row in of_arm]
                for key in COLUMNS.values()
            ]
            cells = [f"{mean(each):.2f} ({min(each):.2f}–{max(each):.2f})" for each in values]
            seconds = mean(row["seconds"] for row in of_arm)
            print(f"| {arm} | {len(of_arm)} | {seconds:.0f} | {' | '.join(cells)} |", flush=True)


def print_types(results: list[dict[str, Any]]) -> None:
    types = sorted({name for row in results for name in row["by_type"]})
    print(f"\n| look-alikes violate comply | {' | '.join(types)} |\n|---|{'---|' * len(types)}")
    for arm in ARMS:
        of_arm = [row["by_type"] for row in results if row["arm"] == arm]
        if of_arm:
            cells = [f"{mean(row[name] for row in of_arm):.2f}" for name in types]
            print(f"| {arm} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="what was run is kept here")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["none", "group", "untrained"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=8)
    for name in ("model", "benign", "unsafe"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--tolerance", type=float, default=-2.0, help="ε of comply_borderline")
    parser.add_argument("--benign-count", type=int, default=60)
    parser.add_argument("--benign-characters", type=int, default=300, help="of an answer")
    parser.add_argument("--unsafe-count", type=int, default=120)
    parser.add_argument("--unsafe-test", type=int, default=30)
    arguments = parser.parse_args()
    results = run_all(arguments)
    print_arms(results)
    print_types(results)


if __name__ == "__main__":
    main()
