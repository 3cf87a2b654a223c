"""From a requirement to a model that meets it, with a certificate that survives the selection."""

from pl_pointwise.extras import needs

with needs("compare", __name__):
    from .p_values import fewest_samples, p_value, samples_needed
    from .requirement import Requirement, RequirementError
    from .selection import Candidate, Selection, select

__all__ = [
    "Candidate",
    "Requirement",
    "RequirementError",
    "Selection",
    "fewest_samples",
    "p_value",
    "samples_needed",
    "select",
]
