"""The tasks that ship: their Lightning modules and data modules."""

from pl_pointwise.tasks.reranker import RerankerDataModule, RerankerModule

__all__ = ["RerankerDataModule", "RerankerModule"]
