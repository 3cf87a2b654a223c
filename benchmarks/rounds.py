"""What the language-model benchmarks share: rounds, clocks, memory, the floor, random shapes.

Contestants take turns, each run in a process of its own, so that its peak of memory is its own.
A GPU is used where there is one.

The floor is the time of the matrix products that the records need, at the rate measured for such
products in the same process, or, if that takes longer, the time of reading the weights they need at
the measured rate of copying. It counts a prompt once for all its responses, logits where a response
token is predicted, no padding, and for training with frozen weights two passes (forward, and
backward to the activations). Utilisation is the floor's share of the time taken.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"

SHAPES = {
    # MiniMind2-Small's layers under a vocabulary like Llama 3's
    "llama-small-128k": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    # Llama-3.2-1B
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("model", type=Path, help="folder of a causal language model")
    options.add_argument(
        "--random", choices=SHAPES, help="these shapes, the folder's tokenizer"
    )
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--batch-size", type=int, default=4)
    options.add_argument(
        "--max-prompt", type=int, default=1024, help="longer ones are left out"
    )
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--contestants", nargs="+")
    add_common(options)
    return options


def add_common(options: argparse.ArgumentParser) -> None:
    """What :func:`run` reads, and what only gpu.py asks for."""
    options.add_argument(
        "--json", type=Path, help="where to write every round's figures"
    )
    options.add_argument(
        "--fast", action="store_true", help="the others' fast options, see gpu.py"
    )
    options.add_argument("--only", help=argparse.SUPPRESS)
    options.add_argument("--folder", help=argparse.SUPPRESS)


def run(
    arguments: argparse.Namespace,
    groups: Sequence[Sequence[str]],
    measure: Callable[[str, argparse.Namespace], Mapping[str, float]],
    unit: str,
) -> None:
    """Measure every contestant in turn, and print a table of each group.

    Args:
        groups: contestants; ratios are to the first of each group.
        measure: seconds, cpu_seconds and floor_seconds for ``unit``, samples in it, peak_gib and
            above_gib of one contestant.
    """
    if arguments.only:
        torch.set_num_threads(arguments.threads)
        print(json.dumps(measure(arguments.only, arguments)))
        return
    names = [name for group in groups for name in group]
    if unknown := set(arguments.contestants or ()) - set(names):
        sys.exit(
            f"unknown contestants {sorted(unknown)}: those that there are: {names}"
        )
    found: dict[str, list[dict[str, float]]] = {
        name: [] for name in names if name in (arguments.contestants or names)
    }
    with tempfile.TemporaryDirectory() as folder:
        source = str(arguments.model)
        if arguments.random:
            source = write_random(arguments.random, arguments.model, Path(folder))
        environment = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads)}
        for turn in range(arguments.rounds):
            for name in found:
                command = [
                    sys.executable,
                    *sys.argv,
                    "--only",
                    name,
                    "--folder",
                    source,
                ]
                done = subprocess.run(
                    command, capture_output=True, env=environment, text=True
                )
                if done.returncode:
                    sys.exit(f"{name} failed:\n{done.stderr[-4000:]}")
                found[name].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {turn + 1}, {name}: {found[name][-1]}", flush=True)
    print(f"\n{machine()}; {arguments.threads} threads, {arguments.rounds} rounds")
    for group in groups:
        if present := {name: found[name] for name in group if name in found}:
            print(f"\n{table(present, unit)}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"machine": machine(), "rounds": found}, indent=1)
        )


def write_random(shape: str, tokenizer: Path, folder: Path) -> str:
    """A folder with a Llama of random weights and a vocabulary of 128,256; bf16 on a GPU."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=128_256,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    model = LlamaForCausalLM(config)
    (model.bfloat16() if CUDA else model).save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def machine() -> str:
    """Hardware and versions."""
    from importlib.metadata import distributions

    packages = (
        "torch",
        "transformers",
        "peft",
        "lightning",
        "trl",
        "sentence-transformers",
    )
    installed = {found.name: found.version for found in distributions()}
    versions = ", ".join(
        f"{name} {installed[name]}" for name in packages if name in installed
    )
    if CUDA:
        hardware = torch.cuda.get_device_name()
    else:
        lines = (
            Path("/proc/cpuinfo").read_text().splitlines()
            if sys.platform == "linux"
            else []
        )
        names = {
            line.partition(":")[2].strip()
            for line in lines
            if line.startswith("model name")
        }
        hardware = f"{os.cpu_count()} cores of {names.pop() if names else platform.processor()}"
    return f"{hardware}; {versions}"


def table(found: Mapping[str, list[dict[str, float]]], unit: str) -> str:
    """Markdown: medians over rounds, the spread of the seconds, ratios to the first contestant."""
    median = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    first = next(iter(median.values()))
    lines = [
        f"| | s/{unit} (min–max) | samples/s | × | CPU s | × | floor s | utilisation "
        "| peak GiB | × | above imports | × |",
        "|---" * 12 + "|",
    ]
    for name, runs in found.items():
        own, seconds = median[name], [run["seconds"] for run in runs]
        taken = own["seconds"] if CUDA else own["cpu_seconds"]
        lines.append(
            f"| {name} | {own['seconds']:.3g} ({min(seconds):.3g}–{max(seconds):.3g}) "
            f"| {own['samples'] / own['seconds']:.3g} | {first['seconds'] / own['seconds']:.2f} "
            f"| {own['cpu_seconds']:.3g} | {first['cpu_seconds'] / own['cpu_seconds']:.2f} "
            f"| {own['floor_seconds']:.2g} | {own['floor_seconds'] / taken:.0%} "
            f"| {own['peak_gib']:.2f} | {own['peak_gib'] / first['peak_gib']:.2f} "
            f"| {own['above_gib']:.2f} | {own['above_gib'] / first['above_gib']:.2f} |"
        )
    return "\n".join(lines)


# In a contestant's own process


def synchronise() -> None:
    if CUDA:
        torch.cuda.synchronize()


class Clock:
    """Marks in wall and CPU time, all threads' together."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []

    def mark(self, *_: Any, **__: Any) -> None:
        synchronise()
        self.marks.append((time.perf_counter(), time.process_time()))

    def spans(self) -> list[tuple[float, float]]:
        """(wall, CPU) seconds between marks."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self.marks)]

    def median_of_last(self, count: int) -> dict[str, float]:
        walls, cpus = zip(*self.spans()[-count:], strict=True)
        return {
            "seconds": round(statistics.median(walls), 4),
            "cpu_seconds": round(statistics.median(cpus), 4),
        }


class Memory:
    """Peak of the process's memory, or the GPU's; made when everything is imported."""

    def __init__(self) -> None:
        self.before = 0.0 if CUDA else _status("VmRSS")

    def peak(self) -> dict[str, float]:
        """GiB: the peak, and how far it is above what imports alone take (on a GPU, nothing)."""
        if CUDA:
            peak = torch.cuda.max_memory_allocated() / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return {"peak_gib": round(peak, 3), "above_gib": round(peak - self.before, 3)}


def _status(name: str) -> float:
    """GiB, of Linux's account of this process; 0 elsewhere."""
    path = Path("/proc/self/status")
    lines = path.read_text().splitlines() if path.exists() else []
    return next(
        (int(li.split()[1]) / 2**20 for li in lines if li.startswith(f"{name}:")), 0.0
    )


def floor_seconds(
    model: str, samples: Sequence[tuple[int, Sequence[int]]], passes: float
) -> float:
    """The least time for samples of so many prompt tokens and response tokens; see the top.

    Args:
        passes: forward and backward passes over each token.
    """
    from transformers import AutoConfig

    flops, read = needed(model, samples)
    rate = product_rate(AutoConfig.from_pretrained(model))
    return passes * max(flops / rate, read / copy_rate())


def needed(
    model: str, samples: Sequence[tuple[int, Sequence[int]]]
) -> tuple[float, float]:
    """FLOP of the matrix products in one pass over such samples, and bytes of weights in bf16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    head = built.get_output_embeddings().weight
    linear = [
        layer.weight for layer in built.modules() if isinstance(layer, torch.nn.Linear)
    ]
    weights = sum(weight.numel() for weight in linear) - head.numel()
    width = config.num_attention_heads * config.head_dim
    flops = 0.0
    for prompt, responses in samples:
        tokens = prompt + sum(responses) - len(responses)
        seen = prompt**2 / 2 + sum(
            length * prompt + length**2 / 2 for length in responses
        )
        flops += 2 * weights * tokens + 2 * head.numel() * sum(responses)
        flops += 4 * width * config.num_hidden_layers * seen
    return flops, 2 * (weights + head.numel())


def product_rate(config: Any, dtype: torch.dtype = torch.bfloat16) -> float:
    """FLOP/s of products, 2,048 tokens by hidden by intermediate size; a CPU second's."""
    left = torch.randn(2048, config.hidden_size, dtype=dtype, device=DEVICE)
    right = torch.randn(
        config.hidden_size, config.intermediate_size, dtype=dtype, device=DEVICE
    )
    return 2 * left.numel() * config.intermediate_size / _best(lambda: left @ right)


def copy_rate() -> float:
    """Bytes/s read when 256 MiB are copied; a CPU second's."""
    source = torch.ones(2**26, device=DEVICE)
    target = torch.empty_like(source)
    return 4 * source.numel() / _best(lambda: target.copy_(source))


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of several repetitions: of all threads' CPU time, or a GPU's clock."""
    now = time.perf_counter if CUDA else time.process_time
    seconds = []
    for _ in range(12):
        synchronise()
        start = now()
        for _ in range(4):
            work()
        synchronise()
        seconds.append((now() - start) / 4)
    return min(seconds)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file."""
    return [
        json.loads(line)
        for line in path.read_text(encoding="utf-8").splitlines()
        if line
    ]


def spread(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """So many of the records, spread over all."""
    chosen = list(rows[:: max(1, len(rows) // count)][:count])
    if len(chosen) < count:
        sys.exit(
            f"{len(rows)} records, {count} are needed. Lower --steps or --batch-size."
        )
    return chosen


def lightning_trainer(
    folder: Path,
    clock: Clock | None = None,
    precision: str = "bf16-mixed",
    **options: Any,
) -> Any:
    """Lightning's trainer without logs and files, with the clock at every step's start."""
    from lightning.pytorch import Callback, Trainer

    class Marks(Callback):
        def on_train_batch_start(self, *_: Any, **__: Any) -> None:
            assert clock is not None
            clock.mark()

        def on_train_end(self, *_: Any, **__: Any) -> None:
            assert clock is not None
            clock.mark()

    return Trainer(
        accelerator="gpu" if CUDA else "cpu",
        devices=1,
        precision=precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if clock is None else [Marks()],
        default_root_dir=folder,
        **options,
    )
