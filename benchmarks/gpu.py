"""All figures of a GPU by one command: `make bench-gpu`, or python -m benchmarks.gpu.

Llama-3.2-1B and ModernBERT-base by their shapes, with random weights, on records made up here, so
that nothing is downloaded. Beside TRL and sentence-transformers with their own fast options as far
as they are installed: flash attention, with which sentence-transformers computes no padding, and
Liger's layers. TRL 1.16 has switched its padding_free option off, and says so when it is set.

The two scripts that are run, which can be run alone, are when2call_against_trl.py and
reranker_against_sentence_transformers.py; a step size of 1e-12 leaves the weights as they are, so
that mean losses over the same records can be compared. Written to --output:

    figures.json   every round of every contestant
    figures.md     medians: time, tokens/s, samples/s, MFU, peak of memory, loss; the targets

MFU is the FLOP that the records need (rounds.py) over time and the stated peak of the GPU. --tiny
exercises everything with small shapes, on a CPU too; what it measures means nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import string
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
MODEL, ENCODER = "language-model", "encoder"

PEAKS = {
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Stated peaks of dense products in bf16, FLOP/s, by a part of the GPU's name."""

CHECKED = 0.02
"""How far mean losses, and the scores' mean and root of the mean square, may differ."""

Rounds = dict[str, list[dict[str, float]]]
Found = dict[str, dict[str, float]]


@dataclass(frozen=True)
class Target:
    """A ratio that is asked for: of ours to the fastest of the others that were measured."""

    title: str
    ours: str
    others: tuple[str, ...]
    at_least: float | None = None  # times as many tokens a second
    at_most: float | None = None  # times the memory
    equal: tuple[str, ...] = ()  # figures that have to agree


TARGETS = (
    Target(
        "DPO, tokens/s beside TRL",
        "ours-dpo",
        ("trl-dpo",),
        at_least=1.6,
        equal=("loss",),
    ),
    Target("DPO, memory beside TRL", "ours-dpo", ("trl-dpo",), at_most=0.6),
    Target(
        "SimPO, tokens/s beside TRL", "ours-simpo", ("trl-simpo",), 1.6, equal=("loss",)
    ),
    Target(
        "re-ranking step, tokens/s beside CrossEncoderTrainer",
        "ours-pointwise (re-ranking)",
        ("st-lambda", "st-lambda-one-pass"),
        at_least=1.8,
    ),
    Target(
        "re-ranking step, memory beside CrossEncoderTrainer",
        "ours-pointwise (re-ranking)",
        ("st-lambda", "st-lambda-one-pass"),
        at_most=0.6,
    ),
    Target(
        "scores, tokens/s beside CrossEncoder.predict",
        "ours-predict-bf16",
        ("st-predict-bf16",),
        at_least=1.5,
        equal=("mean_score", "mean_square"),
    ),
)

LANGUAGE = ("trl-dpo", "ours-dpo", "ours-pointwise", "ours-pointwise-cached")
SIMPO = ("trl-simpo", "ours-simpo")
RERANKING = ("st-lambda", "st-lambda-one-pass", "ours-pointwise", "ours-none")
SCORING = ("st-predict-bf16", "ours-predict-bf16")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("results/bench-gpu"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=20, help="timed, after two that are not"
    )
    parser.add_argument(
        "--batch-size", type=int, default=8, help="preference pairs a step"
    )
    parser.add_argument(
        "--queries", type=int, default=16, help="of ten passages each, a step"
    )
    parser.add_argument(
        "--peak", type=float, help="FLOP/s of the GPU in bf16, if it is not known"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes, one round; on a CPU too"
    )
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        sys.exit(
            "There is no CUDA device here. --tiny exercises the command without one."
        )
    if arguments.tiny:
        arguments.rounds, arguments.steps = 1, 2
        arguments.batch_size = arguments.queries = 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    write_inputs(arguments, arguments.output / "inputs")
    found = {name: run_script(name, arguments) for name in COMMANDS}
    machine = next(iter(found.values()))["machine"]
    rounds = {
        title: runs
        for name in found
        for title, runs in named(name, found[name]).items()
    }
    path = arguments.output / "figures.json"
    path.write_text(json.dumps({"machine": machine, "rounds": rounds}, indent=1))
    text = page(machine, rounds, peak_of(arguments), arguments.tiny)
    (arguments.output / "figures.md").write_text(text)
    print(f"\n{text}\n{path}")


# What is run --------------------------------------------------------------------------------------

COMMANDS = {
    "when2call_against_trl.py": (*LANGUAGE, *SIMPO),
    "reranker_against_sentence_transformers.py": (*RERANKING, *SCORING),
}


def run_script(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """What a script wrote as JSON."""
    inputs, written = arguments.output / "inputs", arguments.output / f"{name}.json"
    language = name == "when2call_against_trl.py"
    contestants = COMMANDS[name]
    if arguments.tiny:  # one of each kind
        contestants = (
            ("trl-dpo", "ours-dpo", *SIMPO)
            if language
            else ("st-lambda", "ours-pointwise", *SCORING)
        )
    folder, records = (
        (MODEL, "preferences.jsonl") if language else (ENCODER, "passages.jsonl")
    )
    command = [
        sys.executable,
        str(HERE / name),
        str(inputs / folder),
        str(inputs / records),
    ]
    command += [
        "--rounds",
        arguments.rounds,
        "--steps",
        arguments.steps,
        "--json",
        written,
        "--fast",
    ]
    command += ["--threads", 1 if arguments.tiny else 8, "--contestants", *contestants]
    if language:
        command += ["--batch-size", arguments.batch_size, "--learning-rate", 1e-12]
    else:
        command += [
            "--queries",
            arguments.queries,
            "--scored",
            4 if arguments.tiny else 200,
        ]
        command += ["--max-length", 96 if arguments.tiny else 512]
    subprocess.run([str(part) for part in command], check=True)
    found: dict[str, Any] = json.loads(written.read_text())
    return found


def named(script: str, found: dict[str, Any]) -> Rounds:
    """The rounds by contestant; what both scripts call alike gets the task's name."""
    more = "" if script == "when2call_against_trl.py" else " (re-ranking)"
    return {
        f"{name}{more}" if name in ("ours-pointwise", "ours-none") else name: runs
        for name, runs in found["rounds"].items()
    }


# Models and records -------------------------------------------------------------------------------


def write_inputs(arguments: argparse.Namespace, folder: Path) -> None:
    """Both models and both files of records, the same ones every time."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        ModernBertConfig,
        ModernBertForSequenceClassification,
    )

    tiny = arguments.tiny
    words = tokenizer(pair=False)
    ids = {
        f"{name}_token_id": getattr(words, f"{name}_token_id")
        for name in ("pad", "bos", "eos")
    }
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4}
    sizes = dict(small, **heads, num_key_value_heads=2, vocab_size=512, head_dim=16)
    if not tiny:  # Llama-3.2-1B
        sizes = {
            "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
            "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "vocab_size": 128_256,
        }  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, **ids, max_position_embeddings=8192, tie_word_embeddings=True,
        initializer_range=0.3 if tiny else 0.05,  # so that likelihoods differ
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder / MODEL)
    words.save_pretrained(folder / MODEL)
    words = tokenizer(pair=True)
    # as it comes: ModernBERT-base
    own = small | heads | {"vocab_size": 512} if tiny else {}
    config = ModernBertConfig(
        **own, pad_token_id=words.pad_token_id, cls_token_id=words.cls_token_id,
        sep_token_id=words.sep_token_id, bos_token_id=None, eos_token_id=None, num_labels=1,
        classifier_pooling="mean",
    )  # fmt: skip
    ModernBertForSequenceClassification(config).save_pretrained(folder / ENCODER)
    words.save_pretrained(folder / ENCODER)
    steps = arguments.steps + 2
    write(folder / "preferences.jsonl", preferences(arguments.batch_size * steps, tiny))
    queries = max(arguments.queries * steps, 4 if tiny else 200)
    write(folder / "passages.jsonl", passages(queries, tiny))


def tokenizer(pair: bool) -> Any:
    """Bytes as tokens, so that a text's length is known; a chat template with tools, or pairs."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[CLS]", "[SEP]"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*special, *alphabet])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    backend.decoder = decoders.ByteLevel()
    if pair:
        backend.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B [SEP]",
            special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
        )
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]"}
    if not pair:
        names = {"bos_token": "[CLS]", "eos_token": "[SEP]"}
    found = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", model_max_length=8192,
        model_input_names=["input_ids", "attention_mask"], **names,
    )  # fmt: skip
    if pair:  # With a template, CrossEncoder takes a pair for a conversation.
        return found
    found.chat_template = (
        "{%- for tool in tools or [] %}{{ tool | tojson }}{%- endfor %}"
        "{%- for message in messages %}[CLS]{{ message.content }}[SEP]{%- endfor %}"
        "{%- if add_generation_prompt %}[CLS]{%- endif %}"
    )
    return found


def preferences(count: int, tiny: bool) -> list[dict[str, Any]]:
    """Records of When2Call's schema: prompts of 200 to 1,000 tokens, responses of 20 to 200."""
    draw = random.Random(0)
    shrink = 20 if tiny else 1
    return [
        {
            "tools": [],
            "messages": [
                {"role": "user", "content": letters(draw, 450, 0.35, 1000, shrink)}
            ],
            **{
                f"{side}_response": {
                    "role": "assistant",
                    "content": letters(draw, 70, 0.6, 200, shrink),
                }
                for side in ("chosen", "rejected")
            },
        }
        for _ in range(count)
    ]


def passages(count: int, tiny: bool) -> list[dict[str, Any]]:
    """Records of MS MARCO's schema: ten passages of about 75 tokens, up to 300."""
    draw = random.Random(1)
    shrink = 8 if tiny else 1
    return [
        {
            "query_id": number,
            "query": letters(draw, 8, 0.3, 30, 1),
            "passages": {
                "is_selected": [int(place == number % 10) for place in range(10)],
                "passage_text": [
                    letters(draw, 70, 0.45, 300, shrink) for _ in range(10)
                ],
            },
        }
        for number in range(count)
    ]


def letters(
    draw: random.Random, median: int, spread: float, most: int, shrink: int
) -> str:
    """A text of log-normal length, one token a letter."""
    length = min(most, round(draw.lognormvariate(0, spread) * median)) // shrink
    return "".join(draw.choices(string.ascii_letters, k=max(length, 3)))


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# What is reported ---------------------------------------------------------------------------------


def peak_of(arguments: argparse.Namespace) -> float | None:
    """FLOP/s in bf16 as stated for this GPU, None where it is not known."""
    if arguments.peak or not torch.cuda.is_available():
        return float(arguments.peak) if arguments.peak else None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def page(machine: str, rounds: Rounds, peak: float | None, tiny: bool) -> str:
    """The figures and the targets as Markdown."""
    found = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in rounds.items()
    }
    lines = [f"{machine}.", ""]
    if tiny:
        lines = ["Small shapes: none of these figures means anything.", "", *lines]
    stated = f"{peak / 1e12:.0f} TFLOP/s" if peak else "not known"
    lines += [
        f"MFU: of the stated peak of bf16 products, {stated}.",
        "",
        "| | s (min–max) | tokens/s | samples/s | MFU | peak GiB | loss or mean score |",
        "|---" * 7 + "|",
    ]
    for name, own in found.items():
        seconds = [run["seconds"] for run in rounds[name]]
        share = f"{own['flops'] / own['seconds'] / peak:.0%}" if peak else "–"
        value = own.get("loss", own.get("mean_score"))
        lines.append(
            f"| {name} | {own['seconds']:.3g} ({min(seconds):.3g}–{max(seconds):.3g}) "
            f"| {own['tokens'] / own['seconds']:,.0f} | {own['samples'] / own['seconds']:.3g} "
            f"| {share} | {own['peak_gib']:.2f} | {'–' if value is None else f'{value:.4f}'} |"
        )
    lines += ["", "| target | asked | found | |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(judged(target, found)) + " |" for target in TARGETS]
    return "\n".join(lines) + "\n"


def judged(target: Target, found: Found) -> tuple[str, str, str, str]:
    """Title, what is asked, what was found, and whether it is met."""
    asked = f"≥ {target.at_least} ×" if target.at_least else f"≤ {target.at_most} ×"
    others = [found[name] for name in target.others if name in found]
    if target.ours not in found or not others:
        return target.title, asked, "–", "not measured"
    ours = found[target.ours]
    if target.at_least:
        rate = ours["tokens"] / ours["seconds"]
        ratio = rate / max(other["tokens"] / other["seconds"] for other in others)
        met = ratio >= target.at_least
    else:
        ratio = ours["peak_gib"] / min(other["peak_gib"] for other in others)
        met = target.at_most is not None and ratio <= target.at_most
    unequal = [key for key in target.equal if abs(ours[key] - others[0][key]) > CHECKED]
    text = f"{ratio:.2f} ×"
    if unequal:
        differing = ", ".join(
            f"{key} {ours[key]:.4f} and {others[0][key]:.4f}" for key in unequal
        )
        return target.title, asked, text, f"not comparable: {differing}"
    return target.title, asked, text, "met" if met else "missed"


if __name__ == "__main__":
    main()
