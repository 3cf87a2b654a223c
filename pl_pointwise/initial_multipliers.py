"""Multipliers taken from a pass over the data before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor

from .batch_statistic import batch_statistic
from .errors import DataError
from .formulations import BatchFormulation, Formulation
from .module import PointwiseModule
from .step import carries, micro_batches_of, terms_of
from .task import evaluation_mode, judges_strictly

Start = Callable[[Tensor], Tensor]
"""Multipliers of violations, elementwise."""


def initialise_multipliers(
    module: PointwiseModule, loader: Iterable[Any], start: Start | None = None
) -> None:
    """Sets λ before training from the violations that the module has now, in one pass.

    In evaluation mode, without gradients. λ is ``start(v)``, of a sample's violations, or of the
    statistic of all samples; 0 where the constraint does not apply to a sample.

    Args:
        module: its formulations say whether it has multipliers per sample or per constraint.
        loader: of batches as in training, over the whole training set, in every process.
        start: λ of violations, elementwise; None takes ∂ψ/∂v at λ = 0, which is (2αv)₊ for
            ``Pointwise``. A standard Lagrangian or an adaptive one needs a ``start``.
    """
    learned = {n: f for n, f in module.formulations.items() if f.scope != "none"}
    for name, formulation in learned.items():
        if start is None and not formulation.penalises:
            raise ValueError(
                f'Constraint "{name}": {formulation} has no α before training; λ alone starts at '
                "0. Give initialise_multipliers a start, such as lambda v: v.relu()."
            )
    index, parts = _pass(module, loader)
    real = index >= 0
    if len(index[real].unique()) < int(real.sum()):
        raise DataError(
            "A sample came twice in the pass over the data: initialise_multipliers takes each once."
        )
    dataset: Any = getattr(loader, "dataset", None)
    samples = len(dataset) if hasattr(dataset, "__len__") else int(index.max()) + 1
    for name, formulation in learned.items():
        violation, mask = (torch.cat(tables) for tables in zip(*parts[name], strict=True))
        if formulation.scope == "batch":
            sides, cpu = module.constraints[name].sides, torch.device("cpu")
            threshold = module.thresholds.get(name, torch.zeros(sides)).reshape(sides)
            count = max(1, int(carries(mask).sum()))
            of_batch, part = cast("BatchFormulation", formulation), [(violation, mask)]
            statistic = batch_statistic(of_batch, part, sides, count, threshold, cpu)
            value = _started(formulation, statistic.value.detach(), start)
            module.multipliers.set(name, value if sides > 1 else value[0])
            continue
        table = violation.new_zeros(samples, violation.shape[1])
        rows = torch.where(mask, _started(formulation, violation, start), 0)
        table[index[real]] = rows[real]
        module.multipliers.set(name, table)


def _pass(
    module: PointwiseModule, loader: Iterable[Any]
) -> tuple[Tensor, dict[str, list[tuple[Tensor, Tensor]]]]:
    """Index (n,), and by constraint violations and masks (b, sides·K) of each batch, on the CPU."""
    index: list[Tensor] = [torch.empty(0, dtype=torch.long)]
    found: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in module.constraints}
    strict, size = judges_strictly(module), module.training_settings.micro_batch_size
    with evaluation_mode(module), torch.no_grad():
        for batch in loader:
            moved = module.transfer_batch_to_device(batch, module.device, 0)
            for micro in micro_batches_of(module, moved, size):
                terms = terms_of(module, micro, module(micro.batch), strict)
                index.append(micro.index)
                for name, parts in found.items():
                    parts.append((terms.judged[name].cpu(), terms.masks[name].cpu()))
    return torch.cat(index), found


def _started(formulation: Formulation, violation: Tensor, start: Start | None) -> Tensor:
    if start is not None:
        return start(violation)
    with torch.enable_grad():
        at = violation.detach().requires_grad_()
        psi = formulation.lagrangian(at, torch.zeros_like(at)).sum()
        return torch.autograd.grad(psi, at)[0]
