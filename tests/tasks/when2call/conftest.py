"""When2Call rows of both schemas, and a module and data on a tiny Llama."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.tasks.conftest import written_files

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
CALL = {"name": "add", "arguments": {"a": 1}}

TEXTS = {
    "direct": "It is 3.",
    "tool_call": f"<TOOLCALL>[{json.dumps(CALL)}]</TOOLCALL>",
    "request_for_info": "Add what to 1?",
    "cannot_answer": "Sorry, I cannot add.",
}


def preference_row(
    question: str = "1 + 2?",
    chosen: str = "tool_call",
    rejected: str = "direct",
    tools: Iterable[Any] = (json.dumps(TOOL),),
) -> dict[str, Any]:
    """A row of the preference split whose responses are the texts of two behaviours."""
    return {
        "tools": list(tools),
        "messages": [{"role": "user", "content": question}],
        "chosen_response": {"role": "assistant", "content": TEXTS[chosen]},
        "rejected_response": {"role": "assistant", "content": TEXTS[rejected]},
        "category": chosen,
        "rejected_category": rejected,
    }


def preference_rows(prompts: int) -> list[dict[str, Any]]:
    """Two rows a prompt, the chosen behaviours in turn."""
    rows = []
    for i in range(prompts):
        chosen = ("tool_call", "request_for_info", "cannot_answer")[i % 3]
        wrong = [name for name in TEXTS if name != chosen]
        rows += [preference_row(f"{i} + {i * i}?", chosen, name) for name in wrong[:2]]
    return rows


def choice_row(
    question: str = "4 + 4?",
    correct: str = "tool_call",
    tools: Iterable[Any] = (json.dumps(TOOL),),
) -> dict[str, Any]:
    """A row of the multiple-choice split; its tool call is bare JSON, as there."""
    answers = {**TEXTS, "tool_call": json.dumps(CALL)}
    row = {"question": question, "tools": list(tools), "answers": answers}
    return row | {"correct_answer": correct}


def choice_rows(count: int) -> list[dict[str, Any]]:
    """Rows whose right behaviours take turns; one in four comes without tools."""
    right = ("tool_call", "request_for_info", "cannot_answer", "cannot_answer")
    return [
        choice_row(f"{i} + 7?", right[i % 4], () if i % 4 == 3 else (json.dumps(TOOL),))
        for i in range(count)
    ]


@pytest.fixture(scope="session")
def when2call_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of six training prompts, two held-out ones and four multiple-choice questions."""
    rows = preference_rows(8)
    files = {"train_file": rows[:12], "val_file": rows[12:], "mcq_file": choice_rows(4)}
    return written_files(tmp_path_factory.mktemp("when2call"), files)
