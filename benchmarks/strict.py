"""What a strict test of generated answers buys on tool calls: valid calls for unseen prompts.

    python benchmarks/strict.py MODEL RECORDS [RECORDS …] --output RESULTS

MODEL is the folder of a causal language model that chats (MiniMind2-Small), RECORDS files of
nvidia/When2Call: its preference records, its multiple-choice records, or both. Records of one
prompt are one sample; kept are those with tools whose prompt and longest response have at most
``--max-tokens``. By seed, a half of the prompts of each behaviour is unseen.

Four arms, of the same data, model and steps: "untrained"; "plain", cross-entropy on the right
answers; "likelihood", KL under pointwise constraints, s̄ ≥ ε of the right and s̄ ≤ ε of the wrong
answers; "strict", the same, but the multipliers of right answers that are tool calls follow whether
the generated answer is a valid call.

Printed, mean over the seeds (smallest–largest): of the unseen prompts that require a call, the
share answered by a call of tools that exist, by a valid one (with the required arguments), and by
the right functions; of the other unseen prompts the share answered by a call; of the seen prompts
that require a call the share answered by a valid one; and the KL. A run that is in RESULTS is not
run again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from arms import parser_of, print_arms, quiet_trainer, run_all
from lightning.pytorch import seed_everything

from pl_pointwise import Optimization, Pointwise, Training
from pl_pointwise.tasks import ConversationDataModule, ConversationModule, Policy
from pl_pointwise.tasks.common.records import digest
from pl_pointwise.tasks.common.splits import hold_out
from pl_pointwise.tasks.conversation.module import ConversationEvaluation
from pl_pointwise.tasks.language_model.conversations import ConversationEncoder
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.encoded import render
from pl_pointwise.tasks.language_model.generation import Generation
from pl_pointwise.tasks.language_model.loading import Lora, load_tokenizer
from pl_pointwise.tasks.language_model.strict import Strict, calls_in
from pl_pointwise.tasks.when2call.records import (
    CATEGORIES,
    Record,
    grouped,
    parse_choice,
    parse_preference,
)

ARMS = ("untrained", "plain", "likelihood", "strict")
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:' }}
{%- for tool in tools %}{% set tool = tool.function or tool %}
{%- set schema = tool.parameters or {} %}{{ '\\n' + tool.name + '(' }}
{%- for name in schema.properties or {} %}{{ ', ' if not loop.first }}{{ name }}
{{- '' if name in (schema.required or []) else '?' }}{%- endfor %}
{{- '): ' + (tool.description or '')[:60] }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}{% set call = call.function or call %}
{{- '<tool_call>{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson }}
{{- '}</tool_call>' }}{%- endfor %}{{ '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""
"""MiniMind's with the tools in a line each: their schemas alone have 1,000 tokens of its small
vocabulary, and few prompts would be left. The test of a call reads the schemas."""
COLUMNS = {
    "existing tool": "test/existing_tool",
    "valid call": "test/valid_calls",
    "right tool": "test/right_tool",
    "call where none is due": "test/needless_calls",
    "valid call, seen": "train/valid_calls",
    "KL": "test/kl",
}


def read_records(paths: list[Path], arguments: argparse.Namespace) -> list[Record]:
    """The records that fit, one a prompt and right answer."""
    tokenizer = load_tokenizer(str(arguments.model), chat_template=TEMPLATE)
    encoder = ConversationEncoder(tokenizer, tools=True)
    parsed = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            row = json.loads(line)
            parse = parse_preference if "messages" in row else parse_choice
            parsed.append(parse(row, f"{path.name}, line {number}"))

    def tokens(record: Record) -> int:
        prompt, answers = render(record, encoder)
        ((ids, responses),) = encoder.encode([prompt], [answers])
        return len(ids) + max(map(len, responses))

    fitting = [r for r in grouped(parsed) if r.tools and tokens(r) <= arguments.max_tokens]
    return list({record.prompt: record for record in fitting}.values())


def as_row(record: Record) -> dict[str, Any]:
    """A record of ConversationDataModule's: the right answer to prefer, the others to avoid."""
    responses = []
    for place, answer in enumerate(record.answers):
        content = {"tool_calls": answer} if isinstance(answer, list) else {"content": answer}
        responses.append({"role": "avoid" if place else "prefer", **content})
    return {
        "messages": record.messages,
        "tools": record.tools,
        "responses": responses,
        "category": record.category,
    }


def split(records: list[Record], arguments: argparse.Namespace, seed: int) -> Iterator[list[Any]]:
    """The seen and the unseen ones, of each behaviour a half; at most ``--at-most`` of each."""
    records = sorted(records, key=lambda record: digest(seed, record.prompt))
    held = hold_out([r.prompt for r in records], [0.5], seed, [r.category for r in records])
    for side in (0, 1):
        kept = []
        for category in CATEGORIES:
            of_it = [r for r, part in zip(records, held, strict=True) if part == side]
            kept += [r for r in of_it if r.category == category][: arguments.at_most]
        yield [as_row(record) for record in kept]


def build_module(arguments: argparse.Namespace, arm: str) -> ConversationModule:
    """The module of one arm, the same in all but what it is trained on and judged by."""
    return ConversationModule(
        Policy(
            str(arguments.model),
            chat_template=TEMPLATE,
            lora=Lora(
                r=16,
                lora_alpha=32,
                lora_dropout=0.05,
                target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
            ),
            generation=Generation(max_new_tokens=arguments.max_new_tokens),
            reference_cache="memory",
        ),
        formulation=Pointwise() if arm in ("likelihood", "strict") else None,
        prefer_tolerance=arguments.prefer_tolerance,
        avoid_tolerance=arguments.avoid_tolerance,
        refuse_tolerance=None,
        objective="cross_entropy" if arm == "plain" else "kl",
        objective_roles=["prefer"] if arm == "plain" else ["prefer", "avoid"],
        evaluation=ConversationEvaluation(answer_in=["test", "train"]),
        judged_by=Strict({"prefer": "tool_call"}) if arm == "strict" else None,
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


def measure(
    arguments: argparse.Namespace, records: list[Record], arm: str, seed: int
) -> dict[str, Any]:
    """Trains one arm and measures it on what is unseen."""
    started, folder = time.monotonic(), arguments.output / f"seed-{seed}" / arm
    folder.mkdir(parents=True, exist_ok=True)
    sizes, files = {}, {}
    for side, rows in zip(("train", "test"), split(records, arguments, seed), strict=True):
        files[f"{side}_file"] = str(folder / f"{side}.jsonl")
        Path(files[f"{side}_file"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
        sizes[side] = {c: sum(row["category"] == c for row in rows) for c in CATEGORIES}
    seed_everything(seed)
    module = build_module(arguments, arm)
    data = ConversationDataModule(
        preparation=Preparation(val_fraction=0.0, max_prompt_length=arguments.max_tokens),
        batch_size=4,
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
    parser = parser_of(__doc__, ARMS, epochs=10)
    parser.add_argument("model", type=Path)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--prefer-tolerance", type=float, default=-0.5)
    parser.add_argument("--avoid-tolerance", type=float, default=-4.0)
    parser.add_argument("--max-tokens", type=int, default=512, help="of prompt and response")
    parser.add_argument("--max-new-tokens", type=int, default=112, help="of a generated answer")
    parser.add_argument("--at-most", type=int, default=24, help="prompts of a behaviour and side")
    arguments = parser.parse_args()
    records = read_records(arguments.records, arguments)
    results = run_all(arguments, partial(measure, arguments, records), COLUMNS)
    print_arms(ARMS, results, COLUMNS)


if __name__ == "__main__":
    main()
