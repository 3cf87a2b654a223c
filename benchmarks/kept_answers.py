"""The tables of what is learnt and what is kept: docs/keep.md, docs/tolerance.md, docs/own_data.md.

    python -m benchmarks.kept_answers keep_tolerances --model MINIMIND --output RUNS --seeds 0 1 2
    python -m benchmarks.kept_answers keep_wording    --model SMOLLM2  --output RUNS
    python -m benchmarks.kept_answers own_data        --model MINIMIND --output RUNS

Each is one ``compare`` by the packaged recipes: three bounds of the KL on the example of ``keep``;
the ways to keep a model's own answers, on the records of the demo; the command of the page on data
of one's own, with the prompts of benchmarks/own_data. evidence/results/NAME.csv has a row for each
run, and own_answers.csv each answer of the last, before and after. MINIMIND and SMOLLM2 are folders
of MiniMind2-Small (26M parameters) and SmolLM2-135M-Instruct.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml

from pl_pointwise.cli import main as pl_pointwise

HERE = Path(__file__).parent
RESULTS = HERE / "evidence/results"
POLICY = "--model.init_args.policy"


def bounds(**tolerances: float) -> dict[str, Any]:
    """An overlay with these bounds in training, and in evaluation."""
    return {"model": {"init_args": {**tolerances, "evaluation": dict(tolerances)}}}


@dataclass
class Table:
    """What a table of a page is made by.

    Args:
        configs: packaged names or files, in order.
        methods: what is compared, as a methods file has it.
        columns: the metrics that are stored.
        options: further options of each run.
    """

    configs: Sequence[str]
    methods: dict[str, Any]
    columns: Sequence[str]
    options: Sequence[str] = field(default_factory=list)


GREEDY = bounds(keep_tolerance=0.05)
GREEDY["model"]["init_args"]["greedy_tolerance"] = 0.1
GREEDY["model"]["init_args"]["evaluation"]["greedy_tolerance"] = 0.0
OWN = {
    "keep_tolerance": 0.01,
    "prefer_tolerance": -0.1,
    "refuse_tolerance": -0.1,
}
TABLES = {
    "keep_tolerances": Table(
        ["keep"],
        {
            f"{e:g}": ["keep/pointwise", bounds(keep_tolerance=e)]
            for e in (0.01, 0.05, 0.2)
        },
        ["train/keep/violated", "train/kl", "train/nll", "train/flipped"],
    ),
    "keep_wording": Table(
        ["keep", str(HERE / "demo.yaml")],
        {
            "plain fine-tuning": "keep/sft",
            "own answers, 0.05": ["keep/pointwise", bounds(keep_tolerance=0.05)],
            "own answers, 0.01": "keep/pointwise",
            "keep/greedy, and 0.05": ["keep/pointwise", GREEDY],
        },
        [
            "train/exact_answers",
            "train/flipped",
            "test/flipped",
            "train/keep/violated",
        ],
        [f"--data.init_args.train_file={HERE / 'demo.jsonl'}"],
    ),
    "own_data": Table(
        ["conversation", "conversation/pointwise"],
        {"the page's": bounds(**OWN)},
        [
            f"{part}/{metric}"
            for part in ("train", "test")
            for metric in ("all_met", "keep/violated", "kl", "flipped", "exact_answers")
        ],
        [
            f"{POLICY}.generation.max_new_tokens=96",
            "--model.init_args.objective_roles=[keep]",
            f"--data.init_args.train_file={HERE / 'own_data/own.jsonl'}",
            f"--data.init_args.keep_file={HERE / 'own_data/general.jsonl'}",
            "--data.init_args.own_answers=true",
            "--data.init_args.batch_size=8",
            "--data.init_args.preparation.val_fraction=0.2",
            "--trainer.max_epochs=60",
        ],
    ),
}


def answers(runs: Path) -> pd.DataFrame:
    """A row for each generated answer: its part, prompt, and what was wanted, before and after."""
    found = []
    for part in ("train", "test"):
        (path,) = runs.rglob(f"answers/{part}.jsonl")
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            keys = ("prompt", "wanted", "before", "answer", "flipped", "exact")
            found.append({"part": part, **{key: row.get(key) for key in keys}})
    return pd.DataFrame(found)


def main(words: Sequence[str] | None = None) -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--model", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", nargs="+", default=["0"])
    given, options = parser.parse_known_args(words)
    torch.set_num_threads(1)
    table, output = TABLES[given.table], given.output / given.table
    output.mkdir(parents=True, exist_ok=True)
    methods = output / "methods.yaml"
    methods.write_text(yaml.safe_dump(table.methods, sort_keys=False), "utf-8")
    command = ["compare", "--methods", str(methods), "--output", str(output)]
    for config in table.configs:
        command += ["--config", config]
    command += ["--seeds", *given.seeds, f"{POLICY}.model_name={given.model}"]
    command += [*table.options, *options]
    pl_pointwise(command)
    rows = pd.read_csv(output / "comparison.csv")
    stored = [name for name in table.columns if name in rows]
    rows[["method", "seed", *stored]].to_csv(
        RESULTS / f"{given.table}.csv", index=False, float_format="%.5g"
    )
    if given.table == "own_data":
        answers(output / "runs").to_csv(RESULTS / "own_answers.csv", index=False)


if __name__ == "__main__":
    main()
