"""Re-ranking with length: relevance as a constraint, short passages as the objective."""

from pl_pointwise.tasks.reranker.data import RerankerDataModule
from pl_pointwise.tasks.reranker.module import RerankerModule

__all__ = ["RerankerDataModule", "RerankerModule"]
