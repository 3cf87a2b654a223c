"""An example to copy: a classifier that must not lose what its predecessor got right."""

from .digits import DigitsDataModule, DigitsModule

__all__ = ["DigitsDataModule", "DigitsModule"]
