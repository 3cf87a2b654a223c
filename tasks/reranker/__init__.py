"""Re-ranking with length: relevance as a constraint, short passages as the objective."""

from .data import RerankerDataModule
from .module import RerankerModule

__all__ = ["RerankerDataModule", "RerankerModule"]
