"""Conversations of your own: what must be answered so, what never so, and what stays as it was."""

from .data import ConversationDataModule
from .module import ConversationModule

__all__ = ["ConversationDataModule", "ConversationModule"]
