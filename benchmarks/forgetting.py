"""Forget forty answers, no less and no more, and keep the others: bands beside one-sided losses.

    python -m benchmarks.forgetting --models MODELS --data DATA --output RUNS --csv forgetting.csv

A small model learns 200 answers about authors who do not exist, by the recipe ``keep`` without
requirements; another learns the 160 to keep alone, and is the target. Then the recipe ``forget``:
the log-probability a token of each of the 40 within .25 of the target's, the KL of each of the
others to what the model was at most .05, and least in the mean. The training samples are the
requirement: there are no others to carry over to. An answer is its first 12 words.

The settings of the rivals are tried on seed 100; of each the one is judged on other seeds that has
the fewest answers outside the band or beyond the budget (ties: the least KL). A row of the CSV is
a run; one that has a row is not repeated. MODELS holds minimind2-small-26m, DATA tofu/. Its records
have no wrong answers, so there is no truth ratio, and forget quality is of likelihoods.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from benchmarks.evidence.workers import run_all
from benchmarks.keeping import CONFIG, MODEL, TUNING_SEED, read
from pl_pointwise.compare.runs import Comparison, Run

BAND, BUDGET, GRACE = 0.25, 0.05, 0.05
"""Nats a token; by how much more an answer counts as too little or too much forgotten."""
SIZES = {"forget": 40, "keep": 160}
WORDS = 12
EPOCHS = {"teach": 12, "forget": 15}
METRICS = {
    "outside": "train/forget/violated_samples",
    "worst, forgotten": "train/forget/max",
    "forget quality": "train/forget_quality",
    "kept lost": "train/keep/violated",
    "worst, kept": "train/keep/max",
    "KL, kept": "train/kl",
    "probability, kept": "train/probability",
}


def of_weight(overlay: str, option: str, weight: float) -> Any:
    init = {"formulation": {"init_args": {option: weight}}}
    if option == "forget_weight":
        init = {"baselines": {option: weight}}
    return [overlay, {"model": {"init_args": init}}]


RELAXED = {"init_args": {"price": 10.0, "beta": None, "cost": None}}
UNTUNED: dict[str, Any] = {
    "as it is": {"trainer": {"max_epochs": 0}},
    "Pointwise()": "forget/pointwise",
    "Relaxed(price=10)": ["forget/relaxed", {"model": {"init_args": {"formulation": RELAXED}}}],
}
TUNED: dict[str, dict[str, Any]] = {
    "hinge": {f"hinge {w:g}": of_weight("forget/penalty_hinge", "weight", w) for w in (1, 3, 10)},
    "average": {f"average {w:g}": of_weight("forget/average", "dual_lr", w) for w in (0.1, 1)},
    "gradient difference": {
        f"gradient difference {w:g}": of_weight("forget/gradient_difference", "forget_weight", w)
        for w in (0.03, 0.1, 0.3)
    },
    "NPO": {f"NPO {w:g}": of_weight("forget/npo", "forget_weight", w) for w in (0.1, 0.3, 1)},
}


def write_records(data: Path, folder: Path, seed: int) -> dict[str, str]:
    """Returns the files of a seed by role."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for role, count in SIZES.items():
        rows = [json.loads(line) for line in (data / f"tofu/{role}.jsonl").open(encoding="utf-8")]
        random.Random(seed).shuffle(rows)
        for row in rows:
            row["answer"] = " ".join(row["answer"].split()[:WORDS])
        path = folder / f"{role}-{seed}.jsonl"
        lines = "".join(json.dumps(row) + "\n" for row in rows[:count])
        path.write_text(lines, encoding="utf-8")
        found[role] = str(path)
    return found


def execute(
    task: str, model: str, methods: Mapping[str, Any], data: dict[str, Any], seed: int, args: Any
) -> list[Run]:
    """The finished runs of a recipe."""
    policy = {**CONFIG["model"]["init_args"]["policy"], "model_name": model}
    init = {**CONFIG["model"]["init_args"], "policy": policy}
    epochs = EPOCHS["teach"]
    if task == "forget":
        epochs = EPOCHS["forget"]
        init |= {"forget_tolerance": BAND, "keep_tolerance": BUDGET}
        init["evaluation"] = {"forget_tolerance": BAND, "keep_tolerance": BUDGET, "answer_in": []}
    preparation = {**CONFIG["data"]["init_args"]["preparation"], "val_fraction": 0.0}
    data = {**CONFIG["data"]["init_args"], "preparation": preparation, **data}
    trainer = {**CONFIG["trainer"], "max_epochs": epochs}
    if task == "keep":
        trainer["callbacks"] = [{"class_path": "pl_pointwise.callbacks.ModelExport"}]
    whole = {"model": {"init_args": init}, "data": {"init_args": data}, "trainer": trainer}
    files = []
    for name, content in (("config", whole), ("methods", dict(methods))):
        files.append(args.output / f"{task}-{name}-{seed}.yaml")
        files[-1].write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    folder = args.output / f"{task}-{seed}"
    runs = Comparison([task, str(files[0])], folder, str(files[1]), [seed]).runs
    run_all(runs, args.workers)
    for each in runs:
        result = each.result() or {"error": "not run"}
        if "error" in result:
            raise RuntimeError(f"{each.title}: {result['error']}")
    return runs


def measure(run: Run) -> dict[str, float]:
    """The columns of a run."""
    metrics = (run.result() or {})["metrics"]
    # Of each answer to forget how far it is above the band, and how far below it.
    excess = run.violations()["train/forget"].reshape(-1, 2) > GRACE
    found = {name: metrics[of] for name, of in METRICS.items()}
    return found | {"too little": excess[:, 0].mean(), "too far": excess[:, 1].mean()}


def study(methods: Mapping[str, Any], seed: int, args: argparse.Namespace) -> None:
    """Runs what has no row yet and adds the rows."""
    known = read(args.csv)
    done = known[known["seed"] == seed]["method"].tolist() if len(known) else []
    methods = {name: overlay for name, overlay in methods.items() if name not in done}
    if not methods:
        return
    files = write_records(args.data, args.output / "records", seed)
    teaching = {
        name: ["keep/sft", {"data": {"init_args": {"train_file": of, "role": "learn"}}}]
        for name, of in (("taught", list(files.values())), ("target", [files["keep"]]))
    }
    base = str((args.models / MODEL).absolute())
    taught, target = (
        str(run.folder.absolute() / "export")
        for run in execute("keep", base, teaching, {}, seed, args)
    )
    data = {f"{role}_file": path for role, path in files.items()} | {"forget_like": target}
    for run in execute("forget", taught, methods, data, seed, args):
        row = {name: f"{value:.6g}" for name, value in measure(run).items()}
        part = "tuning" if seed == TUNING_SEED else "judged"
        row = {"part": part, "method": run.method, "seed": str(seed), **row}
        new = not args.csv.is_file()
        with args.csv.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*row], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)


def chosen(rows: pd.DataFrame) -> dict[str, Any]:
    """Returns the setting of each rival that is judged, by the runs of the tuning seed."""
    tuning = rows[rows["seed"] == TUNING_SEED].set_index("method")
    tuning["missed"] = tuning["outside"] * SIZES["forget"] + tuning["kept lost"] * SIZES["keep"]
    tuning["missed"] = tuning["missed"].round()
    found = {}
    for settings in TUNED.values():
        best = str(tuning.loc[[*settings]].sort_values(["missed", "KL, kept"]).index[0])
        found[best] = settings[best]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("models", "data", "output", "csv"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args(arguments)
    args.output.mkdir(parents=True, exist_ok=True)
    every = {name: overlay for settings in TUNED.values() for name, overlay in settings.items()}
    study({**UNTUNED, **every}, TUNING_SEED, args)
    judged = {**UNTUNED, **chosen(read(args.csv))}
    for seed in args.seeds:
        study(judged, seed, args)


if __name__ == "__main__":
    main()
