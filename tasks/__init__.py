"""The tasks that ship: their Lightning modules and data modules."""

from .conversation import ConversationDataModule, ConversationModule
from .language_model.generation import Generation
from .language_model.loading import Lora
from .language_model.policy import Policy
from .reranker import RerankerDataModule, RerankerModule
from .safety import SafetyDataModule, SafetyModule
from .when2call import When2CallDataModule, When2CallModule

__all__ = [
    "ConversationDataModule",
    "ConversationModule",
    "Generation",
    "Lora",
    "Policy",
    "RerankerDataModule",
    "RerankerModule",
    "SafetyDataModule",
    "SafetyModule",
    "When2CallDataModule",
    "When2CallModule",
]
