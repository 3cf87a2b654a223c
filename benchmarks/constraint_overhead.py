"""What a constraint costs: whole training steps in pairs with plain training, and its own work.

    python benchmarks/constraint_overhead.py --compare reranker/pointwise reranker/relaxed -- \\
        --config reranker --config reranker/local --data.init_args.train_file train.jsonl ...

What follows -- is what pl-pointwise fit takes, of any task; each name after --compare is one more
--config, and the same with formulation null is what they are compared with; that runs twice, and
how far the other one is from 1 says what the ratios are worth. All are fitted at the same time in
threads that take turns step by step, so that a pair of steps has the same batch and the same moment
of the machine. A GPU is used where the configuration uses it.

Three figures for each. The ratio of whole steps, median over pairs, with its quartiles; on a
machine that others use, of CPU time. The time of the places where a formulation does anything, the
loss made of the terms and the dual step, less what the loss of plain training takes: its share of a
step is far below the noise of whole steps. And the share of the time of all steps after the first
64 that measuring the unit of the gradients takes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback

from pl_pointwise import PointwiseModule
from pl_pointwise.cli import PointwiseCLI

CONTROL, PLAIN = "formulation none, first in turn", "formulation none"
LEFT_OUT = 3
"""Steps at the start that are not counted."""
MEASURED_OFTEN = 65
"""Steps that have measured the unit more often than is asked of a long fit."""


class Turns:
    """Lets one fit at a time take a step, in turn, and keeps what its steps took."""

    def __init__(self, count: int) -> None:
        self.count, self.turn = count, 0
        self.condition = threading.Condition()
        self.left: set[int] = set()

    def take(self, position: int) -> None:
        with self.condition:
            self.condition.wait_for(lambda: self.turn == position)

    def hand_on(self, position: int, finished: bool = False) -> None:
        with self.condition:
            if finished:
                self.left.add(position)
            others = [(position + i) % self.count for i in range(1, self.count + 1)]
            self.turn = next((other for other in others if other not in self.left), -1)
            self.condition.notify_all()


class Clock(Callback):
    """Times one fit's steps, each in its turn."""

    def __init__(self, turns: Turns, position: int) -> None:
        self.turns, self.position = turns, position
        self.steps: list[tuple[float, float]] = []
        self.own: list[float] = []
        self.unit: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        if self.steps:  # Only now, so that loading its batch was in its own turn too.
            self.turns.hand_on(self.position)
            self.turns.take(self.position)
        self.own.append(0.0)
        self.unit.append(0.0)
        self.start = now()

    def on_train_batch_end(self, *_: Any) -> None:
        end = now()
        self.steps.append((end[0] - self.start[0], end[1] - self.start[1]))

    def timed(
        self, method: Callable[..., Any], sums: list[float]
    ) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = now()
            result = method(*args, **kwargs)
            sums[-1] += now()[0] - start[0]
            return result

        return call


def now() -> tuple[float, float]:
    """Seconds by the clock, and of CPU time."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter(), time.process_time()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--compare", nargs="+", required=True, help="packaged configurations"
    )
    parser.add_argument(
        "--steps", type=int, default=30, help="of each, after three not counted"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "fit", nargs="+", help="after --: the options of pl-pointwise fit"
    )
    arguments = parser.parse_args()
    extra = {
        name: ["--model.init_args.formulation", "null"] for name in (CONTROL, PLAIN)
    }
    extra |= {name: ["--config", name] for name in arguments.compare}
    turns = Turns(len(extra))
    clocks, threads = {}, []
    for position, (name, options) in enumerate(extra.items()):
        cli = PointwiseCLI(
            [*arguments.fit, *options, *limits(arguments.steps)], run=False
        )
        clock = clocks[name] = Clock(turns, position)
        callbacks: list[Callback] = cli.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(clock)
        watch(cli.model, clock)
        threads.append(
            threading.Thread(target=run, args=(cli, turns, position, arguments.threads))
        )
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    short = [
        name for name, clock in clocks.items() if len(clock.steps) < arguments.steps
    ]
    if short:
        sys.exit(
            f"{', '.join(short)}: fewer than {arguments.steps} steps were taken, see above."
        )
    print(table(clocks))


def limits(steps: int) -> list[str]:
    """The options that make it a fit of so many steps and nothing else."""
    return [
        *("--trainer.max_steps", str(steps + LEFT_OUT), "--trainer.max_epochs", "-1"),
        *("--trainer.limit_val_batches", "0", "--trainer.logger", "false"),
        *(
            "--trainer.enable_checkpointing",
            "false",
            "--trainer.enable_progress_bar",
            "false",
        ),
        *("--trainer.enable_model_summary", "false"),
    ]


def watch(module: PointwiseModule, clock: Clock) -> None:
    """Time the methods in which formulations are used."""
    loss, stepper = module._lagrangian, module._stepper
    for name in ("counts", "put_in_force", "share", "take"):
        setattr(loss, name, clock.timed(getattr(loss, name), clock.own))
    stepper._measure_units = clock.timed(stepper._measure_units, clock.unit)


def run(cli: PointwiseCLI, turns: Turns, position: int, count: int) -> None:
    try:
        turns.take(position)  # Setting up, tokenising included, is one at a time too.
        torch.set_num_threads(count)
        cli.trainer.fit(cli.model, cli.datamodule)
    finally:
        turns.hand_on(position, finished=True)


def table(clocks: dict[str, Clock]) -> str:
    """Markdown: step, ratio of whole steps by clock and CPU time, and the constraint's own work."""
    plain = clocks[PLAIN]
    base = statistics.median(step[0] for step in plain.steps[LEFT_OUT:])
    own_base = statistics.median(plain.own[LEFT_OUT:])
    lines = [
        "| | ms/step | × none, whole steps (quartiles) | the same, CPU time (quartiles) "
        "| own work, µs/step | own work: × none | unit, share of later steps |",
        "|---" * 7 + "|",
    ]
    for name, clock in clocks.items():
        step = statistics.median(step[0] for step in clock.steps[LEFT_OUT:])
        ratios = []
        for kind in (0, 1):
            pairs = zip(clock.steps[LEFT_OUT:], plain.steps[LEFT_OUT:], strict=False)
            low, middle, high = statistics.quantiles(
                [a[kind] / b[kind] for a, b in pairs], n=4
            )
            ratios.append(f"{middle:.3f} ({low:.3f}–{high:.3f})")
        own = statistics.median(clock.own[LEFT_OUT:]) - own_base
        later = sum(step[0] for step in clock.steps[MEASURED_OFTEN:])
        unit = f"{sum(clock.unit[MEASURED_OFTEN:]) / later:.3f}" if later else "–"
        lines.append(
            f"| {name} | {1e3 * step:.0f} | {ratios[0]} | {ratios[1]} | {1e6 * own:.0f} "
            f"| {1 + own / base:.4f} | {unit} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
