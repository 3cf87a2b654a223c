"""The evidence for docs/evidence.md: every method tuned, chosen and judged alike.

``python -m benchmarks.evidence --help``, or ``make evidence``.
"""
