"""Conversations of every role, and a file of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.tasks import ConversationDataModule, ConversationModule
from pl_pointwise.tasks.conversation.module import DEFAULT_TRAINING
from pl_pointwise.tasks.language_model.model.generation import Generation
from tests.tasks.conftest import ADAPTERS, make_data, make_module, write_rows

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = {"name": "add", "arguments": {"a": 1}}


def conversation_rows(each: int) -> list[dict[str, Any]]:
    """``each`` records of four kinds: a call, a text to avoid, a refusal, and a reference."""
    rows: list[dict[str, Any]] = []
    for i in range(each):
        system = {"role": "system", "content": "Be short."}
        responses: list[list[dict[str, Any]]] = [
            [
                {"role": "prefer", "tool_calls": [CALL]},
                {"role": "avoid", "content": f"It is {i}."},
            ],
            [
                {"role": "avoid", "content": "Never."},
                {
                    "role": "avoid",
                    "content": "Not so.",
                    "tolerance": 0.5,
                    "relative": True,
                },
            ],
            [{"role": "refuse"}],
            [
                {"role": "reference", "content": f"Yes {i}."},
                {"role": "avoid", "refusal": True},
            ],
        ]
        for kind, given in zip(
            ("call", "never", "refuse", "rest"), responses, strict=True
        ):
            ask = {"role": "user", "content": f"{kind} {i}?"}
            row = {"messages": [system, ask], "responses": given, "category": kind}
            rows.append(row | ({"tools": [TOOL]} if kind == "call" else {}))
    return rows


def written(folder: Path, rows: list[dict[str, Any]]) -> str:
    return str(write_rows(folder / "rows.jsonl", rows))


def made(folder: Path, moved: bool = True, **options: Any) -> ConversationModule:
    options = {"lora": ADAPTERS, "generation": Generation(max_new_tokens=4)} | options
    return make_module(ConversationModule, folder, DEFAULT_TRAINING, moved, **options)


def data_of(
    file: Any, folder: Path | None = None, **options: Any
) -> ConversationDataModule:
    options = {"val_fraction": 0.0, "batch_size": 4} | options
    return make_data(ConversationDataModule, folder, {"train_file": file}, **options)


@pytest.fixture
def fitted(
    language_model_folder: Path, tmp_path: Path
) -> Callable[..., ConversationDataModule]:
    """fitted(rows or file, **options) → data of these records, set up for a fit."""

    def make(given: Any, **options: Any) -> ConversationDataModule:
        file = written(tmp_path, given) if isinstance(given[0], dict) else given
        return data_of(file, language_model_folder, stage="fit", **options)

    return make


@pytest.fixture
def batch_of(fitted: Any) -> Callable[..., dict[str, Any]]:
    """batch_of(rows, or a file of which the first of each kind, **options of the data)."""

    def make(given: Any, **options: Any) -> dict[str, Any]:
        data, count = (
            fitted(given, **options),
            4 if isinstance(given, str) else len(given),
        )
        return data.collate(
            [data.datasets["train"][i] | {"index": i} for i in range(count)]
        )

    return make


@pytest.fixture
def scored(
    language_model_folder: Path, batch_of: Any
) -> Callable[..., tuple[Any, Any]]:
    """scored(rows or file, **options) → a module with moved adapters, and the records' batch."""
    return lambda given, **options: (
        made(language_model_folder, **options),
        batch_of(given),
    )


@pytest.fixture(scope="session")
def conversation_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three records of each kind."""
    folder = tmp_path_factory.mktemp("conversation")
    return str(write_rows(folder / "records.jsonl", conversation_rows(3)))
