"""What a strict test of generated answers buys on tool calls: valid calls for unseen requests.

    python benchmarks/strict.py MODEL --output RESULTS

MODEL is the folder of a causal language model that chats (MiniMind2-Small). The requests are those
of tool_requests.csv, written for this: six tools of a household, three of them offered with each
request; what a request needs is a call, a question for what is missing, or to decline. Names,
cities and the like are drawn. By seed, a half of the sentences is unseen, and so is a half of the
values.

Arms, of the same data, model and steps: "untrained"; "plain", cross-entropy on the right answers;
"likelihood", the same under the pointwise constraint s̄ ≥ ε on each of them, at two ε; "strict",
the first of these, but the multipliers of right answers that are calls follow whether the generated
answer is a valid call, asked in every second epoch.

Printed, mean over the seeds (smallest–largest): of the unseen requests that need a call the share
answered by a call of tools that exist, by a valid one (with the required arguments), and by
the right functions; of the other unseen requests the share answered by a call; of the seen requests
that need a call the share answered by a valid one; and the KL. A run that is in RESULTS is not
run again.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

from arms import parser_of, print_arms, quiet_trainer, run_all
from lightning.pytorch import seed_everything

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks import ConversationDataModule, ConversationModule, Policy
from pl_pointwise.tasks.common.splits import hold_out
from pl_pointwise.tasks.conversation.module import ConversationEvaluation
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.generation import Generation
from pl_pointwise.tasks.language_model.strict import Strict, calls_in

REQUESTS = Path(__file__).with_name("tool_requests.csv")
LIKELIHOOD = {"likelihood −.5": -0.5, "likelihood −.02": -0.02}
"""ε of the right answers by arm; the first is that of "strict" too."""
ARMS = ("untrained", "plain", *LIKELIHOOD, "strict")
COLUMNS = {
    "existing tool": "test/existing_tool",
    "valid call": "test/valid_calls",
    "right tool": "test/right_tool",
    "call where none is due": "test/needless_calls",
    "valid call, seen": "train/valid_calls",
    "KL": "test/kl",
}
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{% set tool = tool.function or tool %}
{%- set schema = tool.parameters or {} %}{{ '\\n' + tool.name + '(' }}
{%- for name in schema.properties or {} %}{{ ', ' if not loop.first }}{{ name }}
{{- '' if name in (schema.required or []) else '?' }}{%- endfor %}{{ ')' }}{%- endfor %}
{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{% set call = call.function or call %}
{{- '<tool_call>{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
{{- '}</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""MiniMind's with the tools in a line each: their schemas have hundreds of tokens of its small
vocabulary. The test of a call reads the schemas."""
REQUIRED = {
    "get_weather": ["city"],
    "set_timer": ["minutes"],
    "play_music": ["artist"],
    "send_message": ["name", "text"],
    "turn_on": ["device"],
    "find_train": ["origin", "destination"],
}
OPTIONAL = {
    "get_weather": ["day"],
    "set_timer": ["label"],
    "play_music": ["room"],
    "turn_on": ["room"],
    "find_train": ["day"],
}
CITIES = "Lisbon Oslo Prague Vienna Dublin Madrid Athens Warsaw Bergen Turin Ghent Porto".split()
VALUES = {
    "city": CITIES,
    "origin": CITIES[:6],
    "destination": CITIES[6:],
    "day": "Monday Tuesday Wednesday Thursday Friday Saturday Sunday tomorrow".split(),
    "minutes": ["3", "5", "7", "10", "12", "20", "35", "45"],
    "label": "eggs tea bread laundry rice meeting potatoes cake".split(),
    "artist": ["Bach", "Nina Simone", "Abba", "Miles Davis", "Queen", "Björk", "Elvis", "Sade"],
    "room": ["kitchen", "bathroom", "office", "bedroom", "garage", "hall", "cellar", "attic"],
    "name": "Anna Tom Maria Paul Lena Omar Ruth Ivan".split(),
    "text": [
        "I am late",
        "dinner is at eight",
        "the key is under the mat",
        "see you soon",
        "the train is full",
        "call me back",
        "good luck",
        "I have the tickets",
    ],
    "device": ["lamp", "heater", "fan", "radio", "oven", "printer", "kettle", "projector"],
}


def schema(name: str) -> dict[str, Any]:
    """A tool as a record has it."""
    names = [*REQUIRED[name], *OPTIONAL.get(name, [])]
    properties = {argument: {"type": "string"} for argument in names}
    parameters = {"type": "object", "properties": properties, "required": REQUIRED[name]}
    return {"name": name, "description": name.replace("_", " "), "parameters": parameters}


def record(row: dict[str, str], values: dict[str, list[str]], random: Random) -> dict[str, Any]:
    """One request and the right answer."""
    drawn = {name: random.choice(values[name]) for name in re.findall(r"{(\w+)}", row["prompt"])}
    others = [name for name in REQUIRED if name != row["tool"]]
    offered = random.sample(others, 2 if row["tool"] else 3) + (
        [row["tool"]] if row["tool"] else []
    )
    random.shuffle(offered)
    call = [{"name": row["tool"], "arguments": drawn}]
    right = {"tool_calls": call} if row["behaviour"] == "call" else {"content": row["answer"]}
    return {
        "prompt": row["prompt"].format(**drawn),
        "tools": [schema(name) for name in offered],
        "responses": [{"role": "prefer", **right}],
        "category": row["behaviour"],
    }


def split(seed: int, copies: int) -> list[list[dict[str, Any]]]:
    """The seen and the unseen records; sentences and values of one are not in the other."""
    with REQUESTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    kinds = [row["behaviour"] + row["tool"] for row in rows]
    held = hold_out([row["prompt"] for row in rows], [0.5], seed, kinds)
    random, sides = Random(seed), []
    shuffled = {name: random.sample(values, len(values)) for name, values in VALUES.items()}
    for side in (0, 1):
        values = {name: found[side::2] for name, found in shuffled.items()}
        records = {}
        for row, part in zip(rows, held, strict=True):
            for _ in range(copies if part == side else 0):
                made = record(row, values, random)
                records[made["prompt"]] = made
        sides.append(list(records.values()))
    return sides


def build_module(arguments: argparse.Namespace, arm: str) -> ConversationModule:
    """The module of one arm, the same in all but what it is trained on and judged by."""
    constrained = arm not in ("untrained", "plain")
    return ConversationModule(
        Policy(
            str(arguments.model),
            chat_template=TEMPLATE,
            lora=None,  # All weights: answers are generated faster without adapters.
            generation=Generation(max_new_tokens=arguments.max_new_tokens, sample=False),
        ),
        formulation=Pointwise() if constrained else None,
        prefer_tolerance=LIKELIHOOD.get(arm, next(iter(LIKELIHOOD.values()))),
        avoid_tolerance=None,
        refuse_tolerance=None,
        objective="cross_entropy",
        objective_roles=["prefer"],
        evaluation=ConversationEvaluation(answer_in=["test", "train"]),
        judged_by=Strict({"prefer": "tool_call"}, 2) if arm == "strict" else None,
        training=Training(
            optimization=Optimization(
                learning_rate=arguments.learning_rate, weight_decay=0.0, schedule="cosine"
            ),
            gradient_clip_val=1.0,
        ),
    )


def needless(path: Path) -> float:
    """The share of calls among the answers to prompts that require none; NaN of no answer."""
    answers = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    others = [answer["answer"] for answer in answers if "valid_call" not in answer]
    return mean(calls_in(text) is not None for text in others) if others else float("nan")


def measure(arguments: argparse.Namespace, arm: str, seed: int) -> dict[str, Any]:
    """Trains one arm and measures it on what is unseen."""
    started, folder = time.monotonic(), arguments.output / f"seed-{seed}" / arm
    folder.mkdir(parents=True, exist_ok=True)
    sizes, files = {}, {}
    for side, rows in zip(("train", "test"), split(seed, arguments.copies), strict=True):
        files[f"{side}_file"] = str(folder / f"{side}.jsonl")
        Path(files[f"{side}_file"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes[side] = Counter(row["category"] for row in rows)
    seed_everything(seed)
    module = build_module(arguments, arm)
    data = ConversationDataModule(
        preparation=Preparation(val_fraction=0.0),
        batch_size=4,
        eval_batch_size=16,
        seed=seed,
        **files,
    )
    trainer = quiet_trainer(folder, arguments.epochs)
    if arm != "untrained":
        trainer.fit(module, data)
    trained = time.monotonic()
    trainer.test(module, data, verbose=False)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    metrics["test/needless_calls"] = needless(folder / "answers" / "test.jsonl")
    return {
        "arm": arm,
        "seed": seed,
        "seconds": round(trained - started),
        "test_seconds": round(time.monotonic() - trained),
        "prompts": sizes,
        "metrics": metrics,
    }


def main() -> None:
    parser = parser_of(__doc__, ARMS, epochs=16)
    parser.add_argument("model", type=Path)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--copies", type=int, default=2, help="records of a sentence")
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of a generated answer")
    arguments = parser.parse_args()
    results = run_all(arguments, partial(measure, arguments), COLUMNS)
    print_arms(ARMS, results, COLUMNS)


if __name__ == "__main__":
    main()
