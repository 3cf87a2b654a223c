"""An example to copy: a classifier that must not lose what its predecessor got right."""

from pl_pointwise.extras import needs

with needs("example", __name__):
    from .digits import DigitsDataModule, DigitsModule

__all__ = ["DigitsDataModule", "DigitsModule"]
