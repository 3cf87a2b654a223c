"""The reference of a model whose weights are all trained: what they were before.

A LoRA model is its own reference, with the adapters off. Where every weight is trained, the
reference's weights are a second copy of the model's. They are read from the model's files when the
reference is first asked for, and put in the place of the trained ones while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from pl_pointwise.errors import TrainingError

from .vocabulary import decoder_of


class FrozenReference:
    """The weights that a model had before training.

    Args:
        load: loads the model anew, with the same weights every time.

    Attributes:
        loads: how often it was loaded.
    """

    def __init__(self, load: Callable[[], nn.Module]) -> None:
        self.loads = 0
        self._load = load
        self._weights: dict[str, Tensor] = {}

    @contextmanager
    def in_place(self, model: nn.Module, *, head_only: bool = False) -> Iterator[None]:
        """The model computes what it did before training. Left as it was found.

        head_only: of the parameters behind the decoder alone, all that hidden states that are
        already there need.

        Raises:
            TrainingError: weights of which this process holds a part only.
        """
        parameters = _behind_the_decoder(model) if head_only else dict(model.named_parameters())
        trained = {name: weight.data for name, weight in parameters.items()}
        frozen = self._of(parameters)
        cached = torch.is_autocast_cache_enabled()
        # Autocast knows a weight by its identity, and would take the copy of one for the other's.
        torch.set_autocast_cache_enabled(False)
        try:
            for name, weight in parameters.items():
                weight.data = frozen[name]
            yield
        finally:
            for name, weight in parameters.items():
                weight.data = trained[name]
            torch.set_autocast_cache_enabled(cached)

    def release(self, model: nn.Module) -> None:
        """Forget the copy, but for what is behind the decoder. It is read again if asked for."""
        kept = _behind_the_decoder(model).keys()
        self._weights = {name: self._weights[name] for name in kept if name in self._weights}

    @property
    def size(self) -> int:
        """Bytes that the copy takes now."""
        return sum(weight.nbytes for weight in self._weights.values())

    def _of(self, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
        """The frozen weights of these names, on the devices of the trained ones."""
        if any(isinstance(p, DTensor) or hasattr(p, "ds_id") for p in parameters.values()):
            raise TrainingError(
                "policy.lora=null: the reference of a model that is sharded over several devices "
                "is not supported. Train adapters, or use DDP."
            )
        if not parameters.keys() <= self._weights.keys():
            self.loads += 1
            loaded = self._load().named_parameters()
            self._weights = {name: weight.detach() for name, weight in loaded}
        for name, weight in parameters.items():
            self._weights[name] = self._weights[name].to(weight.device, weight.dtype)
        return self._weights


def keep_reference(model: PreTrainedModel, load: Callable[[], nn.Module]) -> None:
    """From now on the model's reference is what ``load`` gives, however it is trained."""
    model.__dict__["frozen_reference"] = FrozenReference(load)


def frozen_reference(model: nn.Module) -> FrozenReference | None:
    """None of a model whose reference is itself, without its adapters."""
    return model.__dict__.get("frozen_reference")


def _behind_the_decoder(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that turn hidden states into logits, those tied to the embeddings included."""
    assert isinstance(model, PreTrainedModel)
    head = model.get_output_embeddings()
    own = {id(weight) for weight in head.parameters()} if head is not None else set()
    before = {id(weight) for weight in decoder_of(model).parameters()} - own
    return {name: weight for name, weight in model.named_parameters() if id(weight) not in before}
