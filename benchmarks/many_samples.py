"""What the bookkeeping of N samples costs, whatever a sample is: seconds, and bytes a sample.

    python benchmarks/many_samples.py --samples 1e6 1e7 1e8

The samples are made when they are read, and the model is small, so that what grows with N is ours:
the epoch's order, the multipliers of one constraint, and the marks of the samples visited.

- start: from ``fit`` to the first batch;
- first step: which makes the table of multipliers;
- order: of another epoch, to its first position; by kind: with samples of three kinds;
- checkpoint: written, with every multiplier different from zero;
- resume: from ``fit(ckpt_path=…)`` to the first batch, in the middle of an epoch.

Every size has two processes of its own, the second for the resume. Memory is how far the process's
peak during the phase is above what it held before, as Linux counts it. "kept" is what stays.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from small_step import BATCH, Constrained
from torch import Tensor

from pl_pointwise import PointwiseDataModule
from pl_pointwise.data import PointwiseSampler

PHASES = ("start", "first step", "order", "order by kind", "checkpoint", "resume")
STEPS = 3  # Before the checkpoint, which lies in the middle of an epoch.


class Rows:
    """So many samples, each made from its index when it is read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.linspace(0, index / self.count, 8)
        return {"x": x, "y": x.sum()}


class Data(PointwiseDataModule):
    """Such samples, to train on."""

    def __init__(self, count: int) -> None:
        super().__init__(batch_size=BATCH)
        self.count = count

    def setup(self, stage: str) -> None:
        self.datasets = {"train": Rows(self.count)}


class Phases(Callback):
    """Seconds and memory of what happens from mark to mark."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = {}
        self.at_start = self.at_end = ""
        self.begin()

    def begin(self) -> None:
        gc.collect()
        _forget_peak()
        self.held, self.started = _memory("VmRSS"), time.perf_counter()

    def end(self, phase: str) -> None:
        """Seconds, bytes of the peak above what was held, bytes kept."""
        seconds = time.perf_counter() - self.started
        peak, kept = _memory("VmHWM") - self.held, _memory("VmRSS") - self.held
        self.found.setdefault(phase, [seconds, peak, kept])
        self.begin()

    def timed(self, phase: str, work: Callable[[], Any]) -> Any:
        self.begin()
        result = work()
        self.end(phase)
        return result

    def on_train_batch_start(self, *_: Any) -> None:
        if self.at_start:
            self.end(self.at_start)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.at_end:
            self.end(self.at_end)
        self.at_start = self.at_end = ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=float, nargs="+", default=[1e4, 1e6, 1e7, 1e8]
    )
    parser.add_argument(
        "--folder", type=Path, help="of the checkpoint; the system's by default"
    )
    parser.add_argument("--only", choices=("run", "resume"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        measure = run if arguments.only == "run" else resume
        print(json.dumps(measure(int(arguments.samples[0]), arguments.folder)))
        return
    print("| samples | phase | seconds | peak, bytes a sample | kept, bytes a sample |")
    print("|---|---|---|---|---|")
    for samples in map(int, arguments.samples):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found: dict[str, list[float]] = {}
            for part in ("run", "resume"):
                command = [
                    sys.executable,
                    __file__,
                    "--only",
                    part,
                    "--samples",
                    str(samples),
                ]
                output = subprocess.check_output(
                    [*command, "--folder", folder], text=True
                )
                found |= json.loads(output.splitlines()[-1])
        for phase in PHASES:
            print_row(samples, phase, *found[phase])


def print_row(
    samples: int, phase: str, seconds: float, peak: float, kept: float
) -> None:
    # Below a million samples the process's own fluctuation is larger.
    sizes = [
        f"{size / samples:.1f}" if samples >= 1e6 else "–" for size in (peak, kept)
    ]
    print(
        f"| {samples:,} | {phase} | {seconds:.2f} | {' | '.join(sizes)} |", flush=True
    )


def run(samples: int, folder: Path) -> dict[str, list[float]]:
    """A fit of a few steps, an order, and a checkpoint."""
    warm = Phases()
    # Imports, and torch's first calls.
    trainer(warm, STEPS).fit(Constrained(1), Data(1000))
    phases, module = Phases(), Constrained(1)
    phases.at_start, phases.at_end = "start", "first step"
    fitted = trainer(phases, STEPS)
    phases.begin()
    fitted.fit(module, Data(samples))
    module.multipliers["fit0"].uniform_(1, 2)
    order(phases, "order", Rows(samples), None)
    order(
        phases,
        "order by kind",
        Rows(samples),
        torch.arange(samples, dtype=torch.int8) % 3,
    )
    phases.timed("checkpoint", lambda: fitted.save_checkpoint(folder / "last.ckpt"))
    return phases.found


def order(phases: Phases, phase: str, rows: Rows, kinds: Tensor | None) -> None:
    sampler = PointwiseSampler(rows, strata=kinds)  # type: ignore[arg-type]
    sampler.set_epoch(1)

    def first_position() -> Any:
        positions = iter(sampler)
        next(positions)
        return positions

    phases.timed(phase, first_position)


def resume(samples: int, folder: Path) -> dict[str, list[float]]:
    """A fit from the checkpoint."""
    trainer(Phases(), STEPS).fit(Constrained(1), Data(1000))
    phases = Phases()
    phases.at_start = "resume"
    fitted = trainer(phases, STEPS + 1)
    phases.begin()
    fitted.fit(
        Constrained(1), Data(samples), ckpt_path=folder / "last.ckpt", weights_only=True
    )
    return phases.found


def trainer(phases: Phases, steps: int) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        callbacks=[phases],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _memory(name: str) -> int:
    """Bytes, of Linux's account of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(
        1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")
    )


def _forget_peak() -> None:
    """The peak counts anew from here on."""
    Path("/proc/self/clear_refs").write_text("5")


if __name__ == "__main__":
    main()
