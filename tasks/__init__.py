"""The tasks that ship: their Lightning modules and data modules."""

from .reranker import RerankerDataModule, RerankerModule

__all__ = ["RerankerDataModule", "RerankerModule"]
