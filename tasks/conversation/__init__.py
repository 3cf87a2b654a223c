"""Conversations of your own: what must be answered so, what never so, and what stays as it was."""

from pl_pointwise.extras import needs

with needs("language", __name__):
    from .data import ConversationDataModule as ConversationDataModule
    from .module import ConversationModule as ConversationModule
