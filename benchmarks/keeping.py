"""Learn new answers and keep the others: a KL budget beside replay and weights.

    python -m benchmarks.keeping --models MODELS --data DATA --output RUNS --csv keeping.csv

A small model learns 24 answers about authors who do not exist; general answers are to keep a KL to
the model as it was of at most .05 nats a token, 40 in training and 60 others. Every run is the
recipe ``keep`` with another method (tasks/keep/configs), of the same records, steps and learning
rate. What is reported: the mean negative log-likelihood of the new answers (learnt), the share of
general answers beyond the budget, of those kept in training and of the others, their KL, and the
share of greedy answers that are no longer the same.

The settings of the rivals are tried on seed 100, with 40 other prompts. Of each the one is judged
on other seeds with the fewest prompts beyond the budget, kept and other, among those that learn as
much as the default ``Pointwise()``, up to 5 %; if none does, the one that learns most. Untuned,
every rival has its packaged number. A row of the CSV is a run; one that has a row is not repeated.
evidence/results/keeping.csv has the results. --methods runs those alone on the judged seeds, as
with --epochs 30, the recipe's own length, at which no setting was tried. MODELS
holds minimind2-small-26m, DATA alpaca/ and tofu/.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from benchmarks.evidence.splits import benign
from benchmarks.evidence.workers import run_all
from pl_pointwise.compare.runs import Comparison

MODEL = "minimind2-small-26m"
BUDGET = 0.05
TUNING_SEED = 100
SIZES = {"learn": 24, "keep": 40, "validation": 40, "test": 60}
METRICS = {
    "learnt": "train/nll",
    "beyond, kept": "train/keep/violated",
    "beyond, others": "test/keep/violated",
    "worst, kept": "train/keep/max",
    "worst, others": "test/keep/max",
    "KL, kept": "train/kl",
    "KL, others": "test/kl",
    "flipped, kept": "train/flipped",
    "flipped, others": "test/flipped",
}
CONFIG: dict[str, Any] = {
    "model": {
        "init_args": {
            "policy": {
                "lora": {
                    "r": 16,
                    "lora_alpha": 32,
                    "lora_dropout": 0.0,
                    # The upper half of the layers.
                    "target_modules": ".*layers.[4-7]..*_proj",
                },
                "reference_cache": "memory",
                "generation": {"max_new_tokens": 16},
            },
            "keep_tolerance": BUDGET,
            "evaluation": {"keep_tolerance": BUDGET, "answers_at_most": 10},
            "training": {"optimization": {"learning_rate": 1.0e-3}},
        }
    },
    "data": {
        "init_args": {
            "source": "files",
            "preparation": {"max_prompt_length": 256, "max_length": 512},
            "batch_size": 8,
            "eval_batch_size": 16,
        }
    },
    "trainer": {
        "max_epochs": 12,
        "limit_val_batches": 0,
        "callbacks": None,
        "logger": False,
        "accelerator": "cpu",
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    },
}


def of_weight(shape: str, weight: float) -> Any:
    overlay = {
        "model": {"init_args": {"formulation": {"init_args": {"weight": weight}}}}
    }
    return [{"linear": "keep/penalty", "hinge": "keep/penalty_hinge"}[shape], overlay]


UNTUNED: dict[str, Any] = {
    "as it is": {"trainer": {"max_epochs": 0}},
    "Pointwise()": "keep/pointwise",
    "fine-tuning": "keep/sft",
    "replay 1 %": "keep/replay_1",
    "replay 10 %": "keep/replay_10",
    "KL weight 1": of_weight("linear", 1.0),
    "hinge 3": of_weight("hinge", 3.0),
}
TUNED: dict[str, dict[str, Any]] = {
    "KL weight": {
        f"KL weight {w:g}": of_weight("linear", w) for w in (0.3, 1.0, 3.0, 10.0)
    },
    "hinge": {f"hinge {w:g}": of_weight("hinge", w) for w in (1.0, 3.0, 10.0)},
    "replay": {
        **{f"replay {n} %": f"keep/replay_{n}" for n in (1, 10)},
        "replay all": "keep/replay_all",
    },
}


def write_records(data: Path, folder: Path, seed: int) -> dict[str, Path]:
    """Returns the files of a seed: what is learnt, what is kept, and others to measure on.

    The test prompts are the same for every seed.
    """
    general = [
        {
            "prompt": f"{row['instruction']} {row['input']}".strip(),
            "answer": row["output"],
        }
        for _, row in benign(data, 160)
    ]
    rows = [
        json.loads(line) for line in (data / "tofu/keep.jsonl").open(encoding="utf-8")
    ]
    facts = [{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]
    facts = [row for row in facts if len(row["answer"]) <= 120]
    random.Random("test").shuffle(general)
    test, others = general[: SIZES["test"]], general[SIZES["test"] :]
    random.Random(seed).shuffle(others)
    random.Random(seed).shuffle(facts)
    kept = SIZES["keep"]
    held_out = (
        others[kept : kept + SIZES["validation"]] if seed == TUNING_SEED else test
    )
    parts = {
        "learn": facts[: SIZES["learn"]],
        "keep": others[:kept],
        "test": [{**row, "role": "keep"} for row in held_out],
    }
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, part in parts.items():
        assert part, f"no records for {name}"
        found[name] = folder / f"{name}-{seed}.jsonl"
        found[name].write_text(
            "".join(json.dumps(row) + "\n" for row in part), encoding="utf-8"
        )
    return found


def run(methods: dict[str, Any], seed: int, args: argparse.Namespace) -> None:
    """Runs what has no row yet and adds the rows."""
    known = of_length(read(args.csv), args.epochs)
    done = known[known["seed"] == seed]["method"].tolist() if len(known) else []
    methods = {name: overlay for name, overlay in methods.items() if name not in done}
    if not methods:
        return
    folder = args.output / f"{args.epochs}-epochs" / f"seed-{seed}"
    files = write_records(args.data, args.output / "records", seed)
    CONFIG["model"]["init_args"]["policy"]["model_name"] = str(
        (args.models / MODEL).absolute()
    )
    for name, path in files.items():
        option = {"learn": "learn_file", "keep": "keep_file", "test": "test_file"}[name]
        CONFIG["data"]["init_args"][option] = str(path)
    CONFIG["trainer"]["max_epochs"] = args.epochs
    CONFIG["data"]["init_args"]["val_file"] = str(files["test"])
    config, overlays = (
        args.output / f"config-{seed}.yaml",
        args.output / f"methods-{seed}.yaml",
    )
    config.write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    overlays.write_text(yaml.safe_dump(methods, sort_keys=False), encoding="utf-8")
    runs = Comparison(["keep", str(config)], folder, str(overlays), [seed]).runs
    run_all(runs, args.workers)
    new = not args.csv.is_file()
    with args.csv.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, ["part", "epochs", "method", "seed", *METRICS], lineterminator="\n"
        )
        if new:
            writer.writeheader()
        for each in runs:
            result = each.result() or {"error": "not run"}
            if "error" in result:
                raise RuntimeError(f"{each.title}: {result['error']}")
            found = {
                name: f"{result['metrics'][of]:.6g}" for name, of in METRICS.items()
            }
            part = "tuning" if seed == TUNING_SEED else "judged"
            row = {"part": part, "epochs": args.epochs, "method": each.method}
            writer.writerow({**row, "seed": seed, **found})


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path) if path.is_file() else pd.DataFrame()


def of_length(rows: pd.DataFrame, epochs: int) -> pd.DataFrame:
    return rows[rows["epochs"] == epochs] if len(rows) else rows


def chosen(rows: pd.DataFrame) -> dict[str, Any]:
    """Returns the setting of each rival that is judged, by the runs of the tuning seed."""
    tuning = rows[(rows["seed"] == TUNING_SEED) & (rows["part"] == "tuning")].set_index(
        "method"
    )
    beyond = tuning["beyond, kept"] + tuning["beyond, others"]
    enough = tuning["learnt"] <= 1.05 * tuning.loc["Pointwise()", "learnt"]
    found = {}
    for settings in TUNED.values():
        names = [name for name in settings if enough[name]]
        best = (
            beyond[names].idxmin() if names else tuning["learnt"][[*settings]].idxmin()
        )
        found[str(best)] = settings[str(best)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("models", "data", "output", "csv"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--methods", nargs="+", help="without: those that are chosen")
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    every = {
        name: overlay
        for settings in TUNED.values()
        for name, overlay in settings.items()
    }
    if args.methods:
        judged = {name: (UNTUNED | every)[name] for name in args.methods}
    else:
        run({"Pointwise()": UNTUNED["Pointwise()"], **every}, TUNING_SEED, args)
        judged = {**UNTUNED, **chosen(of_length(read(args.csv), args.epochs))}
    for seed in args.seeds:
        run(judged, seed, args)


if __name__ == "__main__":
    main()
