"""The reference policy: the same weights with the adapters off, and what it said, kept.

It never changes during training, so its last hidden states at the response positions need to be
computed only once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from pl_pointwise.errors import TrainingError
from pl_pointwise.task import evaluation_mode

ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)


def base_of(model: nn.Module) -> PreTrainedModel:
    """The transformers model, without a PEFT wrapper around it (adapted layers stay inside)."""
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(base, PreTrainedModel), f"not a transformers model: {type(base).__name__}"
    return base


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The reference policy: adapters off, evaluation mode, no gradients. Left as it was found."""
    if problem := reference_problem(model):
        raise TrainingError(problem)
    assert isinstance(model, PeftModel)
    trainable = [(weight, weight.requires_grad) for weight in model.parameters()]
    try:
        with evaluation_mode(model), torch.no_grad(), model.disable_adapter():
            yield
    finally:
        for weight, requires_grad in trainable:  # PEFT turns every adapter's gradient on again
            weight.requires_grad_(requires_grad)


def reference_problem(model: nn.Module) -> str | None:
    """Why the model with its adapters off is not a fixed reference policy, or None if it is."""
    if not isinstance(model, PeftModel):
        return (
            "The reference policy is the model with its adapters off, and this model has no "
            "adapters (policy.lora is null). Train adapters, or take an objective and constraints "
            "without a reference, such as cross_entropy."
        )
    for name, weight in model.named_parameters():
        if weight.requires_grad and not belongs_to_adapter(model, name):
            return (
                f"The reference policy would move: base weights are trained (as {name}). Freeze "
                "them, or ask for no reference."
            )
    return None


def belongs_to_adapter(model: nn.Module, name: str) -> bool:
    """Whether a parameter is an adapter's, by the names that PEFT gives them."""
    if not isinstance(model, PeftModel):
        return False
    prefix = getattr(model.base_model, "prefix", "lora_")
    return any(part in name for part in (prefix, "modules_to_save.", "trainable_tokens_"))


class ReferenceCache(dict[tuple[bytes, bytes], Tensor]):
    """Last hidden states of the reference policy, (T, H) on the CPU by (prompt, response).

    The keys are the token ids as bytes, so another record or chat template is another key.

    They are read through the vocabulary layer as in training, so nothing outside the repeated
    layers may be adapted.

    Args:
        model: with adapters.
        dtype: how to keep them. bfloat16 takes half the space of float32, which is exact, and moved
            a KL by 1e-4 to 5e-4 in trials, a tenth of what computing in bfloat16 does.

    Raises:
        ValueError: no fixed reference, or one whose hidden states are not enough.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        if problem := reference_problem(model):
            raise ValueError(problem)
        for name, module in model.named_modules():
            in_a_layer = any(part.isdigit() for part in name.split("."))  # layers are numbered
            if isinstance(module, ADAPTED) and not in_a_layer:
                raise ValueError(
                    f"The reference's hidden states are not kept: {name} is adapted, and they are "
                    "only valid where head, embeddings and final norm stay as they are."
                )
        self.dtype = dtype
