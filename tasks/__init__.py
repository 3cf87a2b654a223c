"""The tasks that ship: their modules and data modules, each imported when it is used."""

from typing import TYPE_CHECKING

from pl_pointwise.extras import imported_on_use

if TYPE_CHECKING:
    from .conversation import ConversationDataModule as ConversationDataModule
    from .conversation import ConversationModule as ConversationModule
    from .language_model.model.adapters import Lora as Lora
    from .language_model.model.generation import Generation as Generation
    from .language_model.model.loading import Policy as Policy
    from .preference import PreferenceDataModule as PreferenceDataModule
    from .preference import PreferenceModule as PreferenceModule
    from .reranker import RerankerDataModule as RerankerDataModule
    from .reranker import RerankerModule as RerankerModule
    from .safety import SafetyDataModule as SafetyDataModule
    from .safety import SafetyModule as SafetyModule
    from .when2call import When2CallDataModule as When2CallDataModule
    from .when2call import When2CallModule as When2CallModule

_MODULES = {
    "ConversationDataModule": "conversation",
    "ConversationModule": "conversation",
    "Generation": "language_model.model.generation",
    "Lora": "language_model.model.adapters",
    "Policy": "language_model.model.loading",
    "PreferenceDataModule": "preference",
    "PreferenceModule": "preference",
    "RerankerDataModule": "reranker",
    "RerankerModule": "reranker",
    "SafetyDataModule": "safety",
    "SafetyModule": "safety",
    "When2CallDataModule": "when2call",
    "When2CallModule": "when2call",
}
__all__ = list(_MODULES)
__getattr__ = imported_on_use(__name__, _MODULES)
