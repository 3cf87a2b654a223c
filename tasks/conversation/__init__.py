"""Conversations of your own: what must be answered so, what never so, and what stays as it was."""

from pl_pointwise.extras import needs

with needs("language", __name__):
    from .data import ConversationDataModule
    from .module import ConversationModule

__all__ = ["ConversationDataModule", "ConversationModule"]
