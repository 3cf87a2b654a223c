"""The tasks that ship: their Lightning modules and data modules."""

from .reranker import RerankerDataModule, RerankerModule
from .when2call import When2CallDataModule, When2CallModule

__all__ = ["RerankerDataModule", "RerankerModule", "When2CallDataModule", "When2CallModule"]
