"""Numbers and columns of a table that is printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def number_text(value: float | None) -> str:
    """Four digits; nothing of None."""
    return "" if value is None else f"{value:.4g}"


def share_text(count: int | None, of: int | None, allowed: int | None = None) -> str:
    """How many of how many, and how many may; nothing where either is not known.

    >>> share_text(18, 400, 20)
    '18 of 400 (20 allowed)'
    """
    if count is None or of is None:
        return ""
    return f"{count:,} of {of:,}" + (
        "" if allowed is None else f" ({allowed:,} allowed)"
    )


def counted(count: int, noun: str) -> str:
    """A count with its noun, which takes an s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def aligned(lines: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns two spaces apart; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [f"{first:<{widths[0]}}"]
        for cell, width in zip(others, widths[1:], strict=True):
            cells.append(f"{cell:>{width}}")
        yield "  ".join(cells).rstrip()
