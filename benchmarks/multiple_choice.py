"""Scoring four candidate answers to a prompt beside the usual harness's way, on the same records.

    python benchmarks/multiple_choice.py MODEL RECORDS

MODEL is the folder of a causal language model whose chat template takes tools (MiniMind2-Small),
RECORDS a JSONL of the schema of nvidia/When2Call's test split. From token ids to the log-likelihood
of every candidate, in float32 and in bf16 autocast. The harness's way, written here: every prompt
with every candidate is a sequence, sequences go in batches of equal length as far as sorting makes
them so, and log-softmax is taken over all logits. --batch-size counts questions; its batches have
four times as many sequences. "difference" is how far apart both ways' scores of the first batch
are.

Rounds, memory and the floor: rounds.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rounds import DEVICE, Clock, Memory, floor_seconds, parser, read_rows, run
from torch import Tensor

from pl_pointwise.tasks import When2CallDataModule
from pl_pointwise.tasks.language_model.data import Preparation
from pl_pointwise.tasks.language_model.likelihood.scoring import ResponseScorer

CONTESTANTS = (("harness", "ours"), ("harness-bf16", "ours-bf16"))

# token ids of the prompt and of each answer
Question = tuple[list[int], list[list[int]]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("records", type=Path)
    options.add_argument("--questions", type=int, default=40)
    options.add_argument(
        "--passes", type=int, default=2, help="timed, after one that is not"
    )
    run(options.parse_args(), CONTESTANTS, measure, "pass")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a pass over all questions, its floor, and memory."""
    from transformers import AutoModelForCausalLM

    memory = Memory()
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        rows = read_rows(arguments.records)[: arguments.questions]
        records.write_text("\n".join(json.dumps(row) for row in rows))
        data = When2CallDataModule(
            arguments.folder,
            source="files",
            mcq_file=str(records),
            preparation=Preparation(
                max_prompt_length=arguments.max_prompt, invalid="skip"
            ),
            eval_batch_size=arguments.batch_size,
        )
        data.setup("test")
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, use_safetensors=True)
    model = model.to(DEVICE).eval()
    batches = [
        {
            key: value.to(DEVICE) if key.endswith("_ids") else value
            for key, value in batch.items()
            if key.startswith(("prompt_", "response_"))
        }
        for batch in data.test_dataloader()["mcq"]
    ]
    questions = [question for batch in batches for question in questions_of(batch)]
    # On a GPU the weights are in bf16 as it is.
    precision = (
        torch.autocast(DEVICE, torch.bfloat16)
        if name.endswith("bf16")
        else nullcontext()
    )

    scorer = ResponseScorer(model)

    def score() -> None:
        if name.startswith("harness"):
            harness(model, questions, 4 * arguments.batch_size)
        else:
            torch.cat([ours(scorer, batch) for batch in batches]).tolist()

    clock = Clock()
    with torch.no_grad(), precision:
        score()
        for _ in range(arguments.passes):
            clock.mark()
            score()
        clock.mark()
        found = {**clock.median_of_last(arguments.passes), **memory.peak()}
        difference = compared(model, scorer, batches[0])
    sizes = [
        (len(prompt), [len(answer) for answer in answers])
        for prompt, answers in questions
    ]
    return {
        **found,
        "floor_seconds": round(floor_seconds(arguments.folder, sizes, 1), 4),
        "samples": len(questions),
        "difference": round(difference, 6),
    }


def ours(scorer: ResponseScorer, batch: dict[str, Tensor]) -> Tensor:
    """Log-likelihoods of all answers of a batch, in the order of the questions."""
    found = scorer(batch, reference=False)
    return found.log_likelihood[found.present]


def compared(model: Any, scorer: ResponseScorer, batch: dict[str, Tensor]) -> float:
    """The largest difference between both ways' scores of the batch, as a share of 1 + |score|."""
    questions = questions_of(batch)
    expected = harness(model, questions, 4 * len(questions))
    return (
        ((ours(scorer, batch).cpu() - expected).abs() / (1 + expected.abs()))
        .max()
        .item()
    )


def questions_of(batch: dict[str, Tensor]) -> list[Question]:
    """The questions of a batch, without padding."""
    found = []
    for row, length in enumerate(batch["prompt_lengths"].tolist()):
        prompt = batch["prompt_ids"][row, :length].tolist()
        answers = zip(
            batch["response_ids"][row], batch["response_lengths"][row], strict=True
        )
        found.append((prompt, [ids[:size].tolist() for ids, size in answers if size]))
    return found


def harness(model: Any, questions: Sequence[Question], batch_size: int) -> Tensor:
    """Log-likelihoods of all answers, in the order of the questions."""
    sequences = [
        (len(prompt), [*prompt, *answer])
        for prompt, answers in questions
        for answer in answers
    ]
    order = sorted(range(len(sequences)), key=lambda place: -len(sequences[place][1]))
    scores = torch.zeros(len(sequences))
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        longest = len(sequences[places[0]][1])
        ids = torch.zeros((len(places), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(places):
            tokens = sequences[place][1]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        logits = model(
            input_ids=ids.to(DEVICE), attention_mask=mask.to(DEVICE), use_cache=False
        ).logits
        every = logits.float().log_softmax(-1)
        for row, place in enumerate(places):
            prompt, tokens = sequences[place]
            answer = torch.tensor(tokens[prompt:], device=DEVICE)
            at = every[row, prompt - 1 : len(tokens) - 1]
            scores[place] = at.gather(1, answer[:, None]).sum().item()
    return scores


if __name__ == "__main__":
    main()
