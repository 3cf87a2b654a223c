"""The language part of ``make demo``: a small model learns new facts, with and without a budget.

    python -m benchmarks.demo --output results/demo/keep [--quick] [further options of compare]

Converts SmolLM2-135M out of a wheel (see ``evidence/smollm.py``), trains it on the shipped records
by plain fine-tuning and by ``Pointwise()``, and prints what both answer beside what it answered
before, with the share of kept answers that are no longer the same.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from textwrap import shorten

from pl_pointwise.cli import main as pl_pointwise

from .evidence.smollm import converted
from .random_model import write_model

METHODS = {"fine-tuning": "keep/sft", "pointwise": "keep/pointwise"}


def answers(runs: Path, method: str) -> dict[str, tuple[str, str, str]]:
    """By prompt its category, the answer before the first step and the last one."""
    (path,) = (runs / method).rglob("answers.jsonl")
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    first: dict[str, str] = {}
    for row in rows:
        first.setdefault(row["prompt"], row["answer"])
    return {row["prompt"]: (row["category"], first[row["prompt"]], row["answer"]) for row in rows}


def side_by_side(output: Path) -> str:
    """The answers of all methods to the same prompts, and the shares of the comparison."""
    of_method = {method: answers(output / "runs", method) for method in METHODS}
    lines = []
    for prompt, (category, before, _) in of_method["pointwise"].items():
        lines += ["", f"[{category}] {shorten(prompt, 100)}", f"  {'before':12s} {_short(before)}"]
        lines += [f"  {name:12s} {_short(of_method[name][prompt][2])}" for name in METHODS]
    with (output / "comparison.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines += ["", "share of kept answers that changed, and that are beyond the budget (training):"]
    for row in rows:
        shares = (float(row[f"train/{name}"]) for name in ("flipped", "keep/violated"))
        lines.append("  {:12s} {:.2f}   {:.2f}".format(row["method"], *shares))
    return "\n".join(lines)


def _short(answer: str) -> str:
    return shorten(answer, 110) if answer.strip() else "(nothing)"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a model of random weights instead")
    of, options = parser.parse_known_args(arguments)
    of.output.parent.mkdir(parents=True, exist_ok=True)
    if of.quick:
        model = write_model(of.output.parent / "random-model")
    else:
        model = converted(of.output.parent / "SmolLM2-135M-Instruct")
    methods = of.output.parent / "keep-methods.json"
    methods.write_text(json.dumps(METHODS))
    command = ["compare", "--config", "keep", "--methods", str(methods), *options]
    command += ["--model.init_args.policy.model_name", str(model), "--output", str(of.output)]
    pl_pointwise(command)
    print(side_by_side(of.output))


if __name__ == "__main__":
    main()
