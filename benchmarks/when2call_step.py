"""Time and memory of a When2Call training step: the plain method against the fast ones.

    python benchmarks/when2call_step.py MODEL RECORDS --method shared_prompt --cache

MODEL is the folder of a causal language model whose chat template takes tools (MiniMind2-Small),
RECORDS a JSONL of the schema of nvidia/When2Call's train_pref. One run measures one method, so that
its peak of memory is its own; without --method every method runs, each in its own process.

A step is what a pointwise constraint needs: forward of prompt, chosen and rejected response,
KL to the reference, both mean log-likelihoods, backward, and an AdamW step on LoRA of rank 8.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

METHODS = (["plain"], ["chunked"], ["shared_prompt"], ["shared_prompt", "--cache"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("records", type=Path)
    parser.add_argument("--method", choices=("plain", "chunked", "shared_prompt"))
    parser.add_argument(
        "--cache", action="store_true", help="the reference's hidden states kept"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="timed, after one that is not"
    )
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument(
        "--max-prompt", type=int, default=1024, help="longer ones are left out"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--precision", choices=("bf16-mixed", "32"), default="bf16-mixed"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--profile", action="store_true", help="print where the time goes"
    )
    arguments = parser.parse_args()
    if arguments.method is None:
        for method in METHODS:
            subprocess.run([sys.executable, *sys.argv, "--method", *method], check=True)
        return
    print(json.dumps(measure(arguments)))


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds a step, samples and prompt tokens a second, and the process's peak of memory."""
    from pl_pointwise.tasks.language_model.likelihood.scoring import (
        ReferenceCache,
        ResponseScorer,
    )
    from pl_pointwise.tasks.language_model.model.adapters import Lora
    from pl_pointwise.tasks.language_model.model.loading import (
        Policy,
        load_language_model,
        load_tokenizer,
    )

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = str(arguments.model)
    model = (
        load_language_model(Policy(name, dtype=arguments.dtype), Lora())
        .to(device)
        .train()
    )
    batches = _batches(arguments, load_tokenizer(name), device)
    cache = None
    if arguments.cache:
        low = arguments.precision == "bf16-mixed"
        cache = ReferenceCache(model, dtype=torch.bfloat16 if low else torch.float32)
    scorer = ResponseScorer(model, method=arguments.method, cache=cache)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=5e-5
    )

    precision = torch.autocast(
        device, torch.bfloat16, enabled=arguments.precision != "32"
    )

    def step(batch: dict[str, torch.Tensor]) -> float:
        with precision:
            scores = scorer(batch)
        assert scores.kl is not None
        chosen, rejected = scores.mean_log_likelihood.unbind(1)
        loss = (scores.kl.mean(1) - 0.5 * chosen + 0.1 * rejected).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if cache is not None:  # a later epoch: every reference is there
        with torch.no_grad(), precision:
            for batch in batches:
                scorer(batch)
    step(batches[0])
    seconds, losses = [], []
    cpu_start = time.process_time()
    for batch in batches[1:]:
        start = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - start)
    cpu_seconds = (time.process_time() - cpu_start) / len(seconds)
    if arguments.profile:
        _profile(lambda: step(batches[1]))
    return {
        "method": arguments.method + ("+cache" if arguments.cache else ""),
        **_figures(batches[1:], seconds),
        # of all threads: on a busy machine, with --threads 1, the figure to compare
        "cpu_seconds_per_step": round(cpu_seconds, 3),
        "mean_loss": round(sum(losses) / len(losses), 4),
    }


def _figures(
    batches: list[dict[str, torch.Tensor]], seconds: list[float]
) -> dict[str, object]:
    """What the timed steps took, and the most memory."""
    mean = statistics.mean(seconds)
    samples = sum(len(batch["prompt_lengths"]) for batch in batches)
    tokens = sum(int(batch["prompt_lengths"].sum()) for batch in batches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if torch.cuda.is_available():
        peak = torch.cuda.max_memory_allocated()
    return {
        "seconds_per_step": round(mean, 3),
        "seconds_median_best": [
            round(statistics.median(seconds), 3),
            round(min(seconds), 3),
        ],
        "samples_per_second": round(samples / sum(seconds), 2),
        "prompt_tokens_mean": round(tokens / samples),
        "prompt_tokens_per_second": round(tokens / sum(seconds)),
        "peak_memory_gib": round(peak / 2**30, 2),
    }


def _batches(
    arguments: argparse.Namespace, tokenizer: Any, device: str
) -> list[dict[str, torch.Tensor]]:
    """One more than there are timed steps, of records whose prompts are not too long."""
    from pl_pointwise.tasks.language_model.likelihood.batch import collate_responses

    rows = [_tokenize(row, tokenizer) for row in _rows(arguments.records)]
    samples = [row for row in rows if len(row[0]) <= arguments.max_prompt]
    random.Random(0).shuffle(samples)
    batches = []
    for step in range(arguments.steps + 1):
        chosen = samples[step * arguments.batch_size :][: arguments.batch_size]
        batch = collate_responses(*zip(*chosen, strict=True))
        batches.append({name: tensor.to(device) for name, tensor in batch.items()})
    return batches


def _rows(records: Path) -> list[dict[str, object]]:
    return [
        json.loads(line)
        for line in records.read_text(encoding="utf-8").splitlines()
        if line
    ]


def _tokenize(row: dict, tokenizer) -> tuple[list[int], list[list[int]]]:
    """Prompt, and chosen and rejected response with the end token."""
    prompt = tokenizer.apply_chat_template(
        row["messages"],
        tools=[json.loads(tool) for tool in row["tools"]] or None,
        add_generation_prompt=True,
        return_dict=True,
    )["input_ids"]
    responses = [
        [
            *tokenizer(row[side]["content"], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        for side in ("chosen_response", "rejected_response")
    ]
    return prompt, responses


def _profile(step) -> None:
    with torch.profiler.profile() as profiler:
        step()
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))


if __name__ == "__main__":
    main()
