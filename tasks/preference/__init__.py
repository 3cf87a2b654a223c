"""Preference pairs: DPO and its like, with a floor under each chosen answer."""

from pl_pointwise.extras import needs

with needs("language", __name__):
    from .data import PreferenceDataModule as PreferenceDataModule
    from .module import PreferenceModule as PreferenceModule
