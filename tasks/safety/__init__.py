"""Safety refusal: unsafe prompts are refused, every one, and answers to the rest stay."""

from pl_pointwise.extras import needs

with needs("language", __name__):
    from .data import SafetyDataModule as SafetyDataModule
    from .module import SafetyModule as SafetyModule
