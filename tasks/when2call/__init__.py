"""When2Call: when to call a tool, ask back, decline or answer, as constraints on likelihoods."""

from pl_pointwise.extras import needs

with needs("language", __name__):
    from .data import When2CallDataModule as When2CallDataModule
    from .module import When2CallModule as When2CallModule
