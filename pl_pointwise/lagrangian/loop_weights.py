"""The trained weights of a loop of one's own, and what Λ compares of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import TrainingError
from .checks import Warn
from .gradient_units import leaves_of, norm_of
from .terms import number_of_ranks, over_ranks
from .trained import (
    COMPILED,
    REENTRANT,
    Weights,
    as_backward_of_fabric,
    is_sharded,
    refuse_static_graph,
    require_all_sharded,
    source_of,
    trained,
)


class LoopWeights:
    """The weights that a loop trains.

    Args:
        parameters: the model, or its parameters; None where the graph of a loss has to tell them.

    Attributes:
        saved_norm: of the weights that a loaded state belongs to, until a step has compared it.
    """

    def __init__(self, parameters: Weights | None) -> None:
        self._source = source_of(parameters)
        self.saved_norm: float | None = None

    def __getstate__(self) -> dict[str, object]:
        """A copy asks the graph for its weights: those of the original are not its own."""
        return {"_source": None, "saved_norm": self.saved_norm}

    def now(self) -> list[Tensor]:
        """Those that require a gradient; [] where only the graph knows them."""
        return trained(self._source)

    def norm(self) -> float | None:
        """Of those of which this rank has the whole; None without any."""
        whole = [weight for weight in self.now() if not is_sharded(weight)]
        return norm_of(whole) if whole else None

    def compare_with_saved(self, warn: Warn) -> None:
        """Warns, in the first step after a state was loaded, of weights of another step."""
        saved, self.saved_norm = self.saved_norm, None
        if not saved:
            return
        now = self.norm()
        if now is not None and abs(now - saved) > 1e-5 * saved:
            warn(
                f"The weights are not those that these multipliers were saved with (norm {now:g}, "
                f"then {saved:g}): a checkpoint may hold files of two steps. Write each into a new "
                "folder, or as one file."
            )

    def behind(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Those of now, or where these are not known the ones that values of a loss depend on."""
        sums = torch.stack([value.sum() for value in values])
        return self.now() or [*leaves_of(sums)]

    def connected(self, loss: Tensor) -> Tensor:
        """For DDP, which averages the ranks' gradients, and waits for those of every rank."""
        # Of the mean over ranks the counts are those of all of them already.
        loss = loss * number_of_ranks()
        # A rank whose samples need no weight, or that has none, would not take part.
        if not loss.requires_grad:
            nothing: Tensor | int = sum((w * 0).sum() for w in self.now())
            loss = loss + nothing
        return loss

    def norm_of_gradient(self, mean: Tensor) -> float:
        """‖∇ mean‖ over all ranks; a rank whose values have no graph has a gradient of 0."""
        weights = self._of(mean)
        # Of sharded weights only backward() adds up the gradients over the ranks.
        if require_all_sharded(weights):
            return _norm_by_backward(mean * number_of_ranks(), weights)
        gradients: Sequence[Tensor | None] = [None] * len(weights)
        if mean.requires_grad and weights:
            try:
                with as_backward_of_fabric():
                    gradients = torch.autograd.grad(
                        mean, weights, retain_graph=True, allow_unused=True
                    )
            except RuntimeError as error:
                # torch tells both by their texts alone.
                if "donated" in str(error):
                    raise TrainingError(COMPILED) from error
                if "use_reentrant" in str(error):
                    raise TrainingError(REENTRANT) from error
                raise
        summed = [
            over_ranks(
                torch.zeros_like(weight) if gradient is None else gradient, "sum"
            )
            for gradient, weight in zip(gradients, weights, strict=True)
        ]
        return norm_of(summed)

    def _of(self, mean: Tensor) -> list[Tensor]:
        """Those whose gradients Λ compares; over ranks the same, in one order."""
        weights = self.now()
        if number_of_ranks() > 1:
            if self._source is None:
                raise TrainingError(
                    "PointwiseLoss(parameters=model) is needed with several ranks: their gradients "
                    "are added up, in one order."
                )
            refuse_static_graph(mean)
            return weights
        if require_all_sharded(weights):
            return weights
        known = {id(weight) for weight in weights}
        leaves = [*leaves_of(mean)]
        # Those of a copy, or of a model that was made anew, are in the graph alone.
        return [leaf for leaf in leaves if id(leaf) in known] or leaves


def _norm_by_backward(mean: Tensor, weights: list[Tensor]) -> float:
    """Of sharded weights, whose gradients are averaged over ranks where backward() leaves them."""
    kept = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    with as_backward_of_fabric():
        mean.backward(retain_graph=True)
    norm = norm_of(weight.grad for weight in weights if weight.grad is not None)
    for weight, gradient in zip(weights, kept, strict=True):
        weight.grad = gradient
    return norm
