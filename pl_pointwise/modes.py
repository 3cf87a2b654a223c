"""Training and evaluation mode of a module and its parts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode (no dropout). Left as it was found."""
    in_training = [module for module in model.modules() if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True
