"""What a loop of one's own does to its losses and steps, where that is likely a mistake.

A step of λ is due after each step of the weights, and after no other loss. So noticed are

    losses of which the weights took no step     not differentiated, or no weight moved
    samples that come again before a step        an optimizer that computes its loss once more
    more samples than there are                  a step() that was forgotten

from outside: a loss does not know its loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import TrainingError
from .checks import Warn
from .trained import is_sharded

PATIENCE = 3
"""So often no weight moved: a schedule that warms up from 0 leaves the first step or two."""
WATCHED_STEPS = 100
"""Steps in which weights are looked at, for which the host waits for a GPU."""
LINE_SEARCH = 7
"""So often the same samples come again by no accident of a sampler."""

CLOSURES = (
    "A loss that an optimizer computes again in a closure (LBFGS, SAM) takes keep=False, and after "
    "its step comes one loss that counts."
)
NOT_DIFFERENTIATED = (
    "A loss since the last step() was not differentiated, and its samples' λ moves all "
    "the same. Call skip() after a batch that is dropped, fails or is only looked at."
)
NOT_MOVED = (
    "Three times no weight moved between a loss and step(): call skip() where the "
    "optimizer took no step (an overflow: GradScaler, "
    "accelerator.optimizer_step_was_skipped), and step() once for all micro-batches "
    "(if accelerator.sync_gradients)."
)


class LoopWatch:
    """Notices such losses and steps, and warns of each mistake once.

    Asked in this order: ``begin`` at the first loss of a step, ``add`` of every loss that counts,
    ``end`` once the weights have taken their step, and then ``forget``, which alone is a skip.

    Args:
        samples: N, of the training set; 0 of a stream.
    """

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self._said = set[str]()
        # Of each loss since the last step: its samples, and whether it was differentiated, in a
        # list that a hook of autograd sets.
        self._indices: list[Tensor] = []
        self._differentiated: list[list[bool]] = []
        # Small weights, and what they were at the first loss of this step.
        self._weights: list[Tensor] = []
        self._before: list[Tensor] = []
        self._unmoved = 0  # Times that they stayed what they were.

    def __getstate__(self) -> dict[str, Any]:
        """A copy has weights and graphs of its own, and is not asked for those of the original."""
        of_original: dict[str, Any] = {
            "_differentiated": [],
            "_weights": [],
            "_before": [],
        }
        return self.__dict__ | of_original | {"_unmoved": 0}

    def watch(self, weights: Iterable[Tensor]) -> None:
        """Watches the two smallest; not weights so coarse that a small step leaves them."""
        fine = [
            weight
            for weight in weights
            if weight.dtype in (torch.float32, torch.float64)
            and weight.numel()
            and not is_sharded(weight)
        ]
        self._weights = sorted(fine, key=torch.Tensor.numel)[:2]

    def begin(self, steps: int) -> None:
        """At the first loss of a step, after so many steps of the weights."""
        watched = self._weights if steps < WATCHED_STEPS else []
        self._before = [weight.detach().clone() for weight in watched]

    def add(self, index: Tensor, loss: Tensor, warn: Warn) -> None:
        """Takes in a loss of samples, (b,), that counts for the step of λ.

        Raises:
            TrainingError: more samples, or the same ones more often, than a step can have.
        """
        alike = sum(torch.equal(index, before) for before in self._indices)
        self._indices.append(index)
        waiting = sum(map(len, self._indices))
        # Twice the training set: an epoch may be accumulated whole, and its last batch filled.
        if len(self._indices) > 1 and waiting > 2 * self.samples > 0:
            raise TrainingError(
                f"{waiting:,} samples since the last step(), of a training set of "
                f"{self.samples:,}: call step() after each step of the optimizer. {CLOSURES}"
            )
        # Rows of a stream are counted anew in each loss, so they are always alike.
        if alike and len(index) and self.samples:
            if alike >= LINE_SEARCH:
                raise TrainingError(
                    f"The same samples came {alike + 1} times since the last step(). {CLOSURES}"
                )
            self._warn_once(
                warn, f"The same samples came twice since the last step(). {CLOSURES}"
            )
        differentiated = [False]
        if loss.requires_grad:

            def note(gradient: Tensor) -> None:
                differentiated[0] = True

            loss.register_hook(note)
        self._differentiated.append(differentiated)

    def end(self, warn: Warn) -> None:
        """Warns of losses since the last step from which the weights took none."""
        if not all(done for (done,) in self._differentiated):
            self._warn_once(warn, NOT_DIFFERENTIATED)
        pairs = [*zip(self._weights, self._before, strict=False)]
        # A weight without a gradient may well stay.
        pushed = all(w.grad is not None and bool(w.grad.any()) for w, _ in pairs)
        if pairs and pushed and all(torch.equal(w, before) for w, before in pairs):
            self._unmoved += 1
            if self._unmoved == PATIENCE:
                self._warn_once(warn, NOT_MOVED)

    def forget(self) -> None:
        """What was seen since the last step."""
        self._indices, self._differentiated, self._before = [], [], []

    def _warn_once(self, warn: Warn, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            warn(sentence)
