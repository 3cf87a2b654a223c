"""What is checked on the first batch of a fit, and what the first epoch must not do.

A check runs until it has its answer and costs nothing afterwards. docs/checks.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from .checkpoints import replayed_random_state
from .errors import DataError, TrainingError
from .fingerprints import kept_random_state
from .fit_checks import (
    SHARED_ROWS,
    has_multipliers_per_sample,
    repeats_samples,
    require_same_data,
    training_set,
)
from .formulations import Penalty
from .rows import Kind, length_of
from .step import OBJECTIVE, Measured, Terms, index_of, pieces_of

if TYPE_CHECKING:
    from .module import PointwiseModule


class Checks:
    """What a module has found out about its data and its values, in one fit."""

    def __init__(self) -> None:
        self.layout: dict[str, Kind] = {}
        """What the batch's entries are, by path; see :func:`~pl_pointwise.rows.take_rows`."""
        self.loader: Any = None
        """The training loader that was checked."""
        self.loaders_set_up_early = False
        """Whether ``configure_optimizers`` made Lightning set up the loaders."""
        self._batch_is_new = False
        self._unproven: set[str] = set()
        """Terms of which no value has been traced back to a trained weight yet."""
        self._awaiting_gradient = False
        self._first: Any = None
        """The first batch, for as long as no weight has had a gradient."""
        self._seen: np.ndarray[Any, Any] | None = None
        """bool (N,): samples that this epoch has visited, in the first one of a loader."""
        self._epochs = 0
        """That the loader has begun."""

    def start(self, module: Any, dataset: Any) -> None:
        """Everything is to be checked again: a fit starts.

        dataset: the training set, None where there is none to index.
        """
        self._unproven = {OBJECTIVE} | {
            name
            for name, formulation in module.formulations.items()
            if not (isinstance(formulation, Penalty) and formulation.weight == 0)
        }
        # Resumed, or trained before: the weights may stand where nothing pulls at them.
        self._awaiting_gradient = module.global_step == 0 and not isinstance(
            module.trainer.strategy,
            DeepSpeedStrategy,  # Keeps the gradients to itself.
        )
        self._first = None
        self.loader_is_new(module, dataset)

    def loader_is_new(self, module: PointwiseModule, dataset: Any) -> None:
        """The checks of data are due again."""
        watched = dataset is not None and has_multipliers_per_sample(module)
        self.loader = module.trainer.train_dataloader
        self._batch_is_new, self._epochs = True, 0
        self._seen = np.zeros(len(dataset), dtype=bool) if watched else None

    def epoch(self, module: Any) -> None:
        """At the start of an epoch: Lightning may have reloaded the training data.

        Raises:
            TrainingError: multipliers belong to other samples than the new loader's.
        """
        if module.trainer.train_dataloader is not self.loader:
            dataset = training_set(module)
            if dataset is not None and has_multipliers_per_sample(module):
                require_same_data(module, dataset)
            self.loader_is_new(module, dataset)
        elif self._epochs or self._seen is None:
            self._seen = None
        else:
            self._seen.fill(False)  # It may hold the rest of an epoch that was resumed.
        self._epochs += 1

    def batch(self, module: PointwiseModule, batch: Any) -> None:
        """Before the first step: index, and whether the batch can be cut into its samples."""
        if not self._batch_is_new:
            return
        self._batch_is_new = False
        self._first = batch if self._awaiting_gradient else None
        piece = next(iter(pieces_of(batch)), None)
        if piece is None:
            raise DataError("A batch is an empty list: the collate function must keep a sample.")
        index = _whole_numbers(index_of(piece))
        self.layout = dict.fromkeys(module.shared_keys, "shared")
        if _cuts_by_layout(module):
            self.layout = _layout_of(piece, index, self.loader) | self.layout
        _require_cut(module, piece, index)

    def terms(self, module: PointwiseModule, terms: Terms) -> Terms:
        """Passes through; in the first batch that carries a term, its values must reach a weight.

        Raises:
            TrainingError: they do not.
        """
        if not self._unproven or not torch.is_grad_enabled():
            return terms
        values = {OBJECTIVE: terms.objective, **terms.violations}
        carried = {name for name in self._unproven if bool(terms.masks[name].any())}
        for name in sorted(carried):
            self._unproven.discard(name)
            if reaches_weight(values[name], module):
                continue
            if name == OBJECTIVE and module.formulations and not terms.objective.any():
                continue  # Constraints alone.
            raise TrainingError(_without_gradient(name, values[name]))
        return terms

    def step(self, module: Any, measured: Measured) -> None:
        """Before a step is taken: the first has a gradient, and none repeats the epoch's samples.

        Raises:
            TrainingError: no trained weight has a gradient, whatever the multipliers; or a sample
                comes twice in an epoch whose sampler hands out each position once.
        """
        self._require_distinct(module, measured.index)
        if not self._awaiting_gradient:
            return
        if not any(bool(mask.any()) for mask in measured.masks.values()):
            return
        if measured.gradient_norm == 0 and not values_have_gradient(module, self._first):
            trained = [name for name, p in module.named_parameters() if p.requires_grad]
            raise TrainingError(
                f"First step: none of the {len(trained)} trained weights has a gradient; it is 0 "
                f"for every term, from {trained[0]} to {trained[-1]}. Nothing would be trained. "
                "Check that forward() uses them and that no activation is dead. 4-bit weights on "
                "a CPU lose their gradient in an evaluation pass: use a GPU, or load them in "
                "bfloat16."
            )
        self._awaiting_gradient, self._first = False, None

    def _require_distinct(self, module: PointwiseModule, index: Tensor) -> None:
        if self._seen is None:
            return
        real = index.numpy()
        real = real[real >= 0]
        if len(real) and real.max() >= len(self._seen):
            return  # The store says which.
        again = real[self._seen[real]].tolist()
        if not again and len(set(real.tolist())) < len(real):
            distinct, counts = np.unique(real, return_counts=True)
            again = distinct[counts > 1].tolist()
        self._seen[real] = True
        if not again:
            return
        self._seen = None
        if not repeats_samples(self.loader):
            raise TrainingError(
                f"Sample index {again[0]} came twice in epoch {module.current_epoch}, and the "
                f"sampler hands out each position once. {SHARED_ROWS}"
            )


def _whole_numbers(index: Tensor) -> Tensor:
    """
    Raises:
        DataError: not whole numbers.
    """
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise DataError(
            f'"index" of a batch is {index.dtype}: give whole numbers, each sample\'s position.'
        )
    return index


# Whether a batch can be cut into its samples ------------------------------------------------------


def _cuts_by_layout(module: PointwiseModule) -> bool:
    return type(module).select.__qualname__ == "PointwiseModule.select"  # Not overridden.


def _layout_of(piece: Any, index: Tensor, loader: Any) -> dict[str, Kind]:
    """What the entries of a batch are, by path: found by collating fewer of its samples.

    Empty where the loader does not collate single rows of a map-style data set, or cannot with
    fewer: then an entry's length alone tells.

    Raises:
        DataError: an entry depends on the number of samples, and has not one row for each.
    """
    dataset: Any = getattr(loader, "dataset", None)
    size = len(index)
    rows = index[index >= 0][: 1 if size == 2 else 2].tolist()
    collate = getattr(loader, "collate_fn", None)
    if size < 2 or not rows or not hasattr(dataset, "__getitem__") or collate is None:
        return {}
    if getattr(loader, "batch_size", None) is None and loader.batch_sampler is None:
        return {}
    try:
        with kept_random_state():
            fewer = next(iter(pieces_of(collate([dataset[row] for row in rows]))))
            if index_of(fewer).tolist() != rows:
                return {}
    except Exception:  # A data set or collate function that needs its loader's calls.
        return {}
    layout: dict[str, Kind] = {}
    _compare(piece, fewer, (size, len(rows)), "", layout)
    return layout


def _compare(
    whole: Any, fewer: Any, sizes: tuple[int, int], path: str, layout: dict[str, Kind]
) -> None:
    """Notes what ``whole``, of sizes[0] samples, is, from ``fewer``, the same of sizes[1]."""
    if hasattr(whole, "keys") and hasattr(fewer, "keys"):
        for key in whole:
            if key in fewer:
                below = f"{path}.{key}" if path else str(key)
                _compare(whole[key], fewer[key], sizes, below, layout)
        return
    lengths = (length_of(whole), length_of(fewer))
    if lengths == sizes:
        layout[path] = "rows"
    elif lengths[0] is None:
        return
    elif isinstance(whole, (list, tuple)) and lengths[0] == lengths[1]:
        layout[path] = "parts"
        for number, (one, other) in enumerate(zip(whole, fewer, strict=True)):
            _compare(one, other, sizes, f"{path}.{number}", layout)
    elif getattr(whole, "shape", None) == getattr(fewer, "shape", ()):
        layout[path] = "shared"
    else:
        layout[path] = "rows"  # Of neither length: refused, unless shared_keys has it.


def _require_cut(module: PointwiseModule, piece: Any, index: Tensor) -> None:
    """
    Raises:
        DataError: select() does not give the samples that were asked for.
    """
    half = max(1, len(index) // 2)
    masks = module.membership(piece)
    for rows in (torch.arange(half), torch.arange(half, len(index))):
        if not len(rows):
            continue
        try:
            part = module.select(piece, rows)
            same = torch.equal(index_of(part), index[rows])
            parts = module.membership(part)
            if same and hasattr(masks, "items"):
                for name, mask in masks.items():
                    if len(mask) == len(index):  # Else the step says so.
                        same &= torch.equal(parts[name].cpu(), mask.cpu()[rows])
        except DataError as error:
            raise DataError(f"{error} {_WHY_CUT}") from error
        except Exception as error:
            raise DataError(
                f"select() cannot take {len(rows)} of the {len(index)} samples of the first batch "
                f"({type(error).__name__}: {error}). Override select() to say how a batch is cut. "
                f"{_WHY_CUT}"
            ) from error
        if not same:
            raise DataError(
                "select() gave other samples than it was asked for, or membership() says something "
                "else of a sample when others stand beside it: each must look at one sample at a "
                f"time. {_WHY_CUT}"
            )


_WHY_CUT = (
    "(A batch is cut for micro-batches, and to leave out a sample whose value is not finite.)"
)


# Whether values depend on what is trained ---------------------------------------------------------


def reaches_weight(values: Tensor, module: PointwiseModule) -> bool:
    """Whether a gradient of ``values`` would arrive at a weight that is trained."""
    sharded = module._weights_are_sharded()
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    opaque = False
    pending, known = [values.grad_fn], set[Any]()
    while pending:
        node = pending.pop()
        if node is None or node in known:
            continue
        known.add(node)
        leaf = getattr(node, "variable", None)
        # Sharded weights are put together into others for the pass.
        if leaf is not None and (sharded or id(leaf) in trained):
            return True
        opaque |= isinstance(node, BackwardCFunction)  # Recomputes what it does not show.
        pending += [following for following, _ in node.next_functions]
    return opaque or id(values) in trained


def _without_gradient(name: str, values: Tensor) -> str:
    term = "The objective" if name == OBJECTIVE else f'Constraint "{name}"'
    method = "objective()" if name == OBJECTIVE else "constraint_values()"
    why = "its values depend on no trained weight"
    if not values.requires_grad:
        why = "its values carry no gradient"
    learned = "" if name == OBJECTIVE else " and its multipliers would only grow"
    return (
        f"{term}: {why}, so it would not be trained{learned}. In {method} and forward(), look for "
        "torch.no_grad(), .detach(), .item(), an argmax, a rounding or a comparison in their way, "
        "or a part of the network that is frozen. What is only to be measured belongs in "
        "evaluation_metrics()."
    )


def values_have_gradient(module: PointwiseModule, batch: Any) -> bool:
    """Whether a weight has a gradient of the objective's or a constraint's values themselves.

    ψ has none where every sample satisfies its constraints, nor an objective at its minimum, so a
    gradient of 0 alone is no error.
    """
    if module._weights_are_sharded() or batch is None:
        return True
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if not trained:
        return True
    with replayed_random_state(module.device), _kept_buffers(module):
        for micro in module._micro_batches(batch):
            terms = module._terms(micro, strict=False)
            for values in _differentiable([terms.objective, *terms.violations.values()]):
                slopes = torch.linspace(0.5, 1.5, values.numel(), device=values.device)
                total = (values * slopes.to(values.dtype).view(values.shape)).sum()
                found = torch.autograd.grad(total, trained, retain_graph=True, allow_unused=True)
                if any(bool(gradient.any()) for gradient in found if gradient is not None):
                    return True
    return False


@contextmanager
def _kept_buffers(module: PointwiseModule) -> Iterator[None]:
    """Runs the block, then puts back running statistics."""
    kept = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept:
                buffer.copy_(value)


def _differentiable(values: Iterable[Tensor]) -> list[Tensor]:
    return [value for value in values if value.requires_grad]
