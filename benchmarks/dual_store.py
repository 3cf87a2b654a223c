"""Time and memory of the multipliers' store against the number of samples.

    python benchmarks/dual_store.py --samples 1e4 1e5 1e6 1e7 1e8 --checkpoint 1e7

One dual step is: read λ of a batch of random samples, ascend, write it back. Beside it, if it is
installed (pip install cooper-optim==1.0.1), the same step of cooper's IndexedMultiplier: forward,
backward, its SGD step on the sparse gradient, and the projection to λ ≥ 0. Each figure has its own
process, in which every multiplier is written once before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from pl_pointwise import Multipliers, Pointwise
from pl_pointwise.training.checkpoints import WholeCheckpointIO

STORES = ("memory", "cooper")
FORMULATION = Pointwise(alpha=None, dual_lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--samples", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7, 1e8]
    )
    parser.add_argument(
        "--checkpoint", type=float, default=1e7, help="samples; 0 for none"
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--steps", type=int, default=200, help="timed in a round, at most 5 s"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--store", choices=STORES, help="measure one, as JSON")
    arguments = parser.parse_args()
    if arguments.store is not None:
        print(
            json.dumps(measure(arguments, arguments.store, int(arguments.samples[0])))
        )
        return
    print(
        "| samples | store | dual step, µs (min–max) | peak, bytes a multiplier | of it private |"
    )
    print("|---|---|---|---|---|")
    for samples in map(int, arguments.samples):
        for store in STORES:
            if store != "cooper" or find_spec("cooper"):
                print_row(samples, store, in_a_process(arguments, store, samples))
    if arguments.checkpoint:
        print("\n| checkpoint | MB | write, s (min–max) | read, s (min–max) |")
        print("|---|---|---|---|")
        print_checkpoint(arguments, int(arguments.checkpoint))


def in_a_process(
    arguments: argparse.Namespace, store: str, samples: int
) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--store", store, "--samples", str(samples)]
    for option in ("batch_size", "steps", "rounds"):
        value = getattr(arguments, option)
        if value is not None:
            command += [f"--{option.replace('_', '-')}", str(value)]
    found: dict[str, list[float]] = json.loads(
        subprocess.check_output(command, text=True)
    )
    return found


def measure(
    arguments: argparse.Namespace, store: str, samples: int
) -> dict[str, list[float]]:
    """Microseconds a step by round; peak and private bytes a multiplier beyond the empty store."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    violation = torch.randn(arguments.batch_size, 1, generator=generator)
    prepare(store, 10)(torch.arange(10), violation[:10])
    before = memory()
    step = prepare(store, samples)
    rounds = []
    for _ in range(arguments.rounds + 1):  # The first is not counted.
        taken: list[float] = []
        while len(taken) < arguments.steps and sum(taken) < 5:
            index = torch.randint(samples, (arguments.batch_size,), generator=generator)
            start = time.perf_counter()
            step(index, violation)
            taken.append(time.perf_counter() - start)
        rounds.append(1e6 * statistics.median(taken))
    after = memory()
    grown = [(after[key] - before[key]) / samples for key in ("VmHWM", "RssAnon")]
    return {"microseconds": rounds[1:], "bytes": grown}


def prepare(store: str, samples: int) -> Callable[[Tensor, Tensor], None]:
    """The dual step of a store in which every multiplier has been written."""
    if store == "cooper":
        return cooper_step(samples)
    multipliers = filled(samples)

    def step(index: Tensor, violation: Tensor) -> None:
        table = multipliers["constraint"]
        table[index] = FORMULATION.ascend(violation, table[index])

    return step


def filled(samples: int) -> Multipliers:
    multipliers = Multipliers(samples)
    multipliers.table("constraint", (samples, 1)).fill_(1.0)
    return multipliers


def cooper_step(samples: int) -> Callable[[Tensor, Tensor], None]:
    from cooper import ConstraintType
    from cooper.multipliers import IndexedMultiplier

    multiplier = IndexedMultiplier(num_constraints=samples)
    multiplier.constraint_type = ConstraintType.INEQUALITY
    multiplier.weight.data.fill_(1.0)
    optimizer = torch.optim.SGD(
        multiplier.parameters(), lr=FORMULATION.dual_lr, maximize=True
    )

    def step(index: Tensor, violation: Tensor) -> None:
        optimizer.zero_grad()
        (multiplier(index) * violation[:, 0]).sum().backward()
        optimizer.step()
        multiplier.post_step_()

    return step


def memory() -> dict[str, int]:
    """Bytes of this process, as Linux counts them: the most so far, and what is not a file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    pairs = (line.split(":") for line in lines if line.endswith(" kB"))
    return {key: 1024 * int(value.split()[0]) for key, value in pairs}


def print_row(samples: int, store: str, found: dict[str, list[float]]) -> None:
    # Below a million samples the process's own fluctuation is larger than the store.
    sizes = [f"{size:.1f}" if samples >= 1e6 else "–" for size in found["bytes"]]
    print(
        f"| {samples:,} | {store} | {spread(found['microseconds'], '.0f')} | {' | '.join(sizes)} |"
    )


def print_checkpoint(arguments: argparse.Namespace, samples: int) -> None:
    """Size, and time to write (to the disk, not only into its cache) and to read back."""
    checkpoint_io = WholeCheckpointIO()
    written, read = [], []
    with tempfile.TemporaryDirectory() as folder:
        multipliers = filled(samples)
        path = Path(folder) / "last.ckpt"
        entry = {"multipliers": multipliers.state_dict()}
        checkpoint = {
            "state_dict": {},
            "pytorch-lightning_version": "2.6.0",
            "pl_pointwise": entry,
        }
        for _ in range(arguments.rounds):
            start = time.perf_counter()
            checkpoint_io.save_checkpoint(checkpoint, path)
            written.append(time.perf_counter() - start)
            start = time.perf_counter()
            Multipliers(samples).load_state_dict(
                checkpoint_io.load_checkpoint(path)["pl_pointwise"]["multipliers"]
            )
            read.append(time.perf_counter() - start)
        size = path.stat().st_size / 1e6
    print(
        f"| {samples:,} | {size:.1f} | {spread(written, '.2f')} | {spread(read, '.2f')} |"
    )


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


if __name__ == "__main__":
    main()
