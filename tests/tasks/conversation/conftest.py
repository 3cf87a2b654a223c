"""Conversations of every role, and a file of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tasks.conftest import write_rows

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = {"name": "add", "arguments": {"a": 1}}


def conversation_rows(each: int) -> list[dict[str, Any]]:
    """``each`` records of four kinds: a call, a text to avoid, a refusal, and a reference."""
    rows: list[dict[str, Any]] = []
    for i in range(each):
        system = {"role": "system", "content": "Be short."}
        responses: list[list[dict[str, Any]]] = [
            [{"role": "prefer", "tool_calls": [CALL]}, {"role": "avoid", "content": f"It is {i}."}],
            [
                {"role": "avoid", "content": "Never."},
                {"role": "avoid", "content": "Not so.", "tolerance": 0.5, "relative": True},
            ],
            [{"role": "refuse"}],
            [{"role": "reference", "content": f"Yes {i}."}, {"role": "avoid", "refusal": True}],
        ]
        for kind, given in zip(("call", "never", "refuse", "rest"), responses, strict=True):
            ask = {"role": "user", "content": f"{kind} {i}?"}
            row = {"messages": [system, ask], "responses": given, "category": kind}
            rows.append(row | ({"tools": [TOOL]} if kind == "call" else {}))
    return rows


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_rows(folder / "rows.jsonl", rows))


@pytest.fixture(scope="session")
def conversation_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three records of each kind."""
    folder = tmp_path_factory.mktemp("conversation")
    return str(write_rows(folder / "records.jsonl", conversation_rows(3)))
