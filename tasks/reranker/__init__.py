"""Re-ranking with length: relevance as a constraint, short passages as the objective."""

from pl_pointwise.extras import needs

with needs("reranker", __name__):
    from .data import RerankerDataModule as RerankerDataModule
    from .module import RerankerModule as RerankerModule
