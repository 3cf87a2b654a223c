"""Rows of preference pairs in the usual forms."""

from __future__ import annotations

from typing import Any


def pair_rows(count: int) -> list[dict[str, Any]]:
    """Two pairs of each prompt, of one chosen answer."""
    return [
        {
            "prompt": f"{i} + 1?",
            "chosen": f"It is {i + 1}.",
            "rejected": wrong * (1 + i % 3),
        }
        for i in range(count)
        for wrong in ("Hm.", "No. ")
    ]
