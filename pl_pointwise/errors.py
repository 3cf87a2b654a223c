"""The package's own errors: what happened, where, what to do."""

from __future__ import annotations


class DataError(ValueError):
    """A record, batch or data set that cannot be used; names the place and the remedy."""


class TrainingError(RuntimeError):
    """A run that cannot go on, or a checkpoint that does not belong to it."""
