"""What the processes of a run exchange in a step, and what a run of many would take by that.

    python benchmarks/ranks.py --ranks 1 2 4 --parameters 852000
    python benchmarks/ranks.py --model-of 64

Measured: a network of so many trained weights under DDP (gloo, CPU), one constraint and then six
with a multiplier per sample, batches of 8 a rank. Counted in every process: the gradients that DDP
reduces, by a communication hook, and every collective of torch.distributed, by name, with the
bytes that a rank hands over. Timed: from the call to the result, so with waiting for the slowest
rank; of the gradients until the last bucket is reduced, part of which the backward pass hides. The
processes of one machine share its memory's bandwidth and its cores: bytes hold for any machine,
times for this one.

The model of a larger run is arithmetic, with every assumption an option: see :func:`model_of`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy
from small_step import BATCH, Constrained, Data

UNTIMED, TIMED = 5, 40
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "broadcast",
    "barrier",
)
CONSTRAINTS = (1, 6)


class Exchanged:
    """Bytes and seconds of every exchange since the last step began."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []
        self.now: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, name: str, size: float, seconds: float) -> None:
        self.now[name][0] += size
        self.now[name][1] += seconds

    def watch(self) -> None:
        """Counts the collectives that are called through torch.distributed from here on."""
        for name in COLLECTIVES:
            counted = self._counted(name, getattr(dist, name))
            for place in (dist, dist.distributed_c10d):
                setattr(place, name, counted)

    def _counted(self, name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        # What a rank hands over: of a gather the second argument, else the first.
        position = int(name.startswith("all_gather"))

        @wraps(collective)
        def call(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            result = collective(*args, **named)
            given = args[position] if len(args) > position else None
            size = given.nbytes if isinstance(given, torch.Tensor) else 0
            self.add(name, size, time.perf_counter() - start)
            return result

        return call

    def reduce_gradients(self, bucket: dist.GradBucket) -> torch.futures.Future[Any]:
        """DDP's own reduction, counted."""
        start, buffer = time.perf_counter(), bucket.buffer()
        work = dist.group.WORLD.allreduce([buffer.div_(dist.get_world_size())])

        def result(done: torch.futures.Future[Any]) -> torch.Tensor:
            self.add("gradients", buffer.nbytes, time.perf_counter() - start)
            return done.value()[0]  # type: ignore[no-any-return]

        return work.get_future().then(result)


class Steps(Callback):
    """Marks the steps."""

    def __init__(self, exchanged: Exchanged) -> None:
        self.exchanged = exchanged

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        # Lightning registers hooks on a GPU only.
        wrapped: Any = trainer.strategy.model
        # A lambda: torch refuses annotations that are texts.
        wrapped.register_comm_hook(
            None, lambda _, bucket: self.exchanged.reduce_gradients(bucket)
        )

    def on_train_batch_start(self, *_: Any) -> None:
        self.exchanged.now.clear()
        self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.exchanged.add("step", 0, time.perf_counter() - self.start)
        self.exchanged.steps.append(
            {name: list(v) for name, v in self.exchanged.now.items()}
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--parameters", type=int, default=852_000, help="that are trained"
    )
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--model-of", type=int, metavar="RANKS", help="print the model instead"
    )
    add_assumptions(parser)
    arguments = parser.parse_args()
    if arguments.model_of:
        print(model_of(arguments.model_of, arguments))
        return
    if arguments.only:
        measure(arguments.only, arguments.parameters)
        return
    print(
        "| ranks | constraints | exchange | bytes handed over a step | ms a step | of the step |"
    )
    print("|---|---|---|---|---|---|")
    for ranks in arguments.ranks:
        for count in CONSTRAINTS:
            print_rows(ranks, count, launched(ranks, count, arguments.parameters))


def launched(ranks: int, count: int, parameters: int) -> dict[str, list[float]]:
    """What rank 0 of so many processes measured: by exchange, bytes and seconds a step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", __file__, "--only", str(count)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.check_output(
        [*command, "--parameters", str(parameters)], env=environment, text=True
    )
    lines = [line for line in output.splitlines() if line.startswith("{")]
    found: dict[str, list[float]] = json.loads(lines[-1])
    return found


def measure(count: int, parameters: int) -> None:
    """On one rank: trains, and rank 0 prints its medians a step."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    exchanged, module = Exchanged(), Constrained(count)
    # 8 × hidden weights, hidden biases, hidden × 1
    hidden = max(1, round(parameters / 10))
    module.network = torch.nn.Sequential(
        torch.nn.Linear(8, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 1)
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=int(os.environ["LOCAL_WORLD_SIZE"]),
            strategy=DDPStrategy(process_group_backend="gloo"),
            max_steps=UNTIMED + TIMED,
            logger=False,
            callbacks=[Steps(exchanged)],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        exchanged.watch()
        trainer.fit(module, Data(batch_size=BATCH))
    steps = exchanged.steps[UNTIMED:]
    never = [0.0, 0.0]
    medians = {
        name: [
            statistics.median(step.get(name, never)[i] for step in steps)
            for i in (0, 1)
        ]
        for name in sorted({name for step in steps for name in step})
    }
    medians = {name: values for name, values in medians.items() if any(values)}
    if trainer.is_global_zero:
        print(json.dumps(medians))


def print_rows(ranks: int, count: int, found: dict[str, list[float]]) -> None:
    step = found.pop("step")[1]
    for name, (size, seconds) in found.items():
        print(
            f"| {ranks} | {count} | {name} | {size:,.0f} | {1e3 * seconds:.2f} ", end=""
        )
        print(f"| {seconds / step:.1%} |", flush=True)
    print(f"| {ranks} | {count} | whole step | | {1e3 * step:.2f} | |", flush=True)


# The model of a larger run ----------------------------------------------------------------------


def add_assumptions(parser: argparse.ArgumentParser) -> None:
    """What the model assumes; by default Llama-3.2-1B with When2Call's published records."""
    options = parser.add_argument_group("assumptions of the model")
    options.add_argument(
        "--trained", type=float, default=852e3, help="weights: LoRA r 8, q and v"
    )
    options.add_argument(
        "--gradient-bytes", type=int, default=4, help="of one weight's gradient"
    )
    options.add_argument(
        "--batch", type=int, default=32, help="samples a rank and step"
    )
    options.add_argument(
        "--columns", type=int, default=2, help="of all constraints together"
    )
    options.add_argument(
        "--bandwidth", type=float, default=25e9, help="bytes/s of a rank's link"
    )
    options.add_argument(
        "--latency", type=float, default=10e-6, help="seconds of one message"
    )
    options.add_argument(
        "--compute", type=float, default=0.5, help="seconds of a step's passes"
    )
    options.add_argument("--samples", type=float, default=9000)
    options.add_argument(
        "--response-tokens", type=float, default=110, help="of a sample"
    )
    options.add_argument(
        "--hidden", type=int, default=2048, help="width of the hidden states"
    )


def model_of(ranks: int, assumed: argparse.Namespace) -> str:
    """Seconds of every exchange of a step, and the memory of a rank, as a table.

    A ring of k ranks: reducing M bytes takes 2(k − 1) messages of M/k, gathering M bytes of every
    rank k − 1 messages of M, each ``latency`` + size / ``bandwidth``; nothing hidden behind the
    backward pass, all links as slow as the slowest. With c columns of constraints a sample's
    row has 4 + 3c numbers of 8 bytes.
    """

    def reduced(size: float) -> float:
        return 2 * (ranks - 1) * (assumed.latency + size / ranks / assumed.bandwidth)

    def gathered(size: float) -> float:
        return (ranks - 1) * (assumed.latency + size / assumed.bandwidth)

    gradient = assumed.trained * assumed.gradient_bytes
    counts = 4.0 * (1 + assumed.columns)
    rows = 8.0 * assumed.batch * (4 + 3 * assumed.columns)
    parts = {
        "gradients, reduced": (gradient, reduced(gradient)),
        "counts of the terms, reduced": (counts, reduced(counts)),
        "what was measured, gathered": (rows, gathered(rows)),
    }
    whole = assumed.compute + sum(seconds for _, seconds in parts.values())
    lines = [
        f"| {ranks} ranks | bytes a rank | ms | of the step |",
        "|---|---|---|---|",
    ]
    for name, (size, seconds) in parts.items():
        lines.append(
            f"| {name} | {size:,.0f} | {1e3 * seconds:.2f} | {seconds / whole:.2%} |"
        )
    lines.append(
        f"| forward and backward (assumed) | | {1e3 * assumed.compute:.0f} | |"
    )
    multipliers = 4 * assumed.samples * assumed.columns / 2**20
    cache = 2 * assumed.hidden * assumed.response_tokens * assumed.samples / 2**30
    lines += ["", "| memory of the host | |", "|---|---|"]
    lines.append(f"| multipliers, MiB a rank | {multipliers:.2f} |")
    lines.append(f"| reference cache in bf16, GiB a machine | {cache:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
