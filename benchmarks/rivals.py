"""Rivals' own programs, and `Pointwise()` beside them, on DC3's convex problems.

    python benchmarks/rivals.py DC3 FOLDER 1000 0    # the folder of its sources, epochs, seeds

Answers are judged as they are, and after 100 of our steps. Seconds are those of the processor.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from unittest.mock import MagicMock

import numpy as np
import torch
from families import CORRECTION, METHODS, PROBLEMS, RESULTS, append, measure, trained
from torch import Tensor
from with_neuromancer import trained_by_neuromancer

from pl_pointwise.tasks.family.family import Proxy, problems

PROBLEM = PROBLEMS["convex"]
# And a training calls none.
UNUSED = "osqp qpth qpth.qp ipopt pypower pypower.api setproctitle"


class Answers(Proxy):
    """A program's answers in the place of the network's."""

    answer: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(x.double()).float()


def trained_by_dc3(epochs: int, seed: int) -> Proxy:
    import default_args
    import method
    import utils

    args = {
        "probType": "simple",
        **default_args.method_default_args("simple"),
        "epochs": epochs,
    }
    of, proxy, draw = (
        problems(PROBLEM.family),
        Answers(PROBLEM.family, "completion"),
        np.random,
    )
    draw.seed(17)  # Its free variables are drawn after its data: the same draws.
    draw.random_sample(2 * PROBLEM.family.variables)
    (
        draw.normal(size=of.A.shape),
        draw.uniform(size=of.x.shape),
        draw.normal(size=of.G.shape),
    )
    numbers = (of.Q.diag(), of.p, of.A, of.G, of.h, of.x)
    data = utils.SimpleProblem(*(each.numpy() for each in numbers))
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        network = method.train_net(data, args, folder)[0].eval()
    proxy.answer = lambda x: method.grad_steps_all(data, x, network(x), args)[0]
    return proxy


PROGRAMS = {
    "Pointwise()": (
        "0.2.0",
        lambda *run: trained(PROBLEM, METHODS["Pointwise()"], run[1], run[0]),
    ),
    "DC3": ("35437af", trained_by_dc3),
    "neuromancer": ("1.5.6", trained_by_neuromancer),
}

if __name__ == "__main__":
    program, folder, epochs, *seeds = sys.argv[1:]
    version, train = PROGRAMS[program]
    torch.set_num_threads(1)
    sys.path.insert(0, folder)
    sys.modules.update({name: MagicMock() for name in UNUSED.split()})
    for seed in map(int, seeds):
        key = {"problem": "convex", "method": program, "version": version, "seed": seed}
        started, rows = time.process_time(), []
        proxy = train(int(epochs), seed)
        seconds = time.process_time() - started
        for steps in (0, CORRECTION):
            # It keeps the optimum for the one that is timed.
            measure(PROBLEM, proxy, steps)
            started = time.process_time()
            found = measure(PROBLEM, proxy, steps)
            found |= {"seconds": seconds, "test seconds": time.process_time() - started}
            shown = {name: f"{value:.6g}" for name, value in found.items()}
            rows.append({**key, "epochs": epochs, "correction": steps, **shown})
        append(RESULTS / "rivals.csv", rows)
