"""Safety refusal: a requirement to refuse each unsafe prompt, and not to refuse the rest."""

from pl_pointwise.extras import needs

with needs("language", __name__):
    from .data import SafetyDataModule as SafetyDataModule
    from .module import SafetyModule as SafetyModule
