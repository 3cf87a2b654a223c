"""The state of a language model's module: what is trained, and nothing of the frozen base.

A checkpoint of adapters is small, and is loaded onto the base that the policy names.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .likelihood.scoring import of_adapter


def trained_names(module: nn.Module) -> set[str]:
    """Names, in the state, of what is trained or belongs to the adapters."""
    names = set[str]()
    for name, weight in module.named_parameters():
        if weight.requires_grad:
            names.add(name)
    # Of the state and not of the parameters, as VeRA's shared matrices are buffers.
    model = module.get_submodule("model")
    for name in model.state_dict():
        if of_adapter(model, name):
            names.add(f"model.{name}")
    return names


def drop_frozen_base(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    """Leaves what is trained in the state: a hook, which no method of a subclass can replace."""
    kept = {prefix + name for name in trained_names(module)}
    # With a prefix the module is a part of another one, whose other weights stay.
    for name in list(state):
        if name.startswith(prefix) and name not in kept:
            del state[name]


def require_trained(module: nn.Module, keys: Any) -> None:
    """Refuses a state that lacks a trained weight, or has one too many.

    keys: what loading it without strictness missed, and what it did not expect.
    """
    missing = sorted(trained_names(module).intersection(keys.missing_keys))
    problems = [f"missing {name}" for name in missing]
    problems += [f"unexpected {name}" for name in keys.unexpected_keys]
    if problems:
        raise RuntimeError(
            f"The checkpoint does not fit what this model trains ({len(problems)} weights, as "
            f"{problems[0]}). Load it with the model and the lora settings it was trained with."
        )
