"""Nulls that Arrow puts into objects of one column are no part of a record, in any file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets

from pl_pointwise.tasks.common.records import records_of, rows_of
from pl_pointwise.tasks.conversation.records import read_record


def row(name: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}}
    function = {"name": name, "arguments": {argument: "1"}}
    return {
        "messages": [
            {"role": "user", "content": "Hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": function}],
            },
            {"role": "tool", "content": "one"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": function}],
            },
        ],
        "tools": [
            {"type": "function", "function": {"name": name, "parameters": schema}}
        ],
    }


def texts_of(path: Path) -> list[str]:
    found = records_of(rows_of(str(path)), "f", read_record)
    return [
        json.dumps([each.messages, each.tools, each.answers], sort_keys=True)
        for each in found
    ]


def test_json_lines_of_a_data_set_are_the_records_of_its_parquet(
    tmp_path: Path,
) -> None:
    rows = [row("f", "a"), row("g", "b")]
    given = tmp_path / "given.jsonl"
    given.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    made = datasets.Dataset.from_list(rows)
    made.to_json(tmp_path / "t.jsonl")
    made.to_parquet(tmp_path / "t.parquet")
    assert '"b":null' in (tmp_path / "t.jsonl").read_text(encoding="utf-8")
    assert (
        texts_of(tmp_path / "t.jsonl")
        == texts_of(tmp_path / "t.parquet")
        == texts_of(given)
    )


def test_a_null_that_the_schema_has_a_place_for_stays(tmp_path: Path) -> None:
    asked = row("f", "a")
    asked["messages"][3]["tool_calls"][0]["function"]["arguments"] = {
        "a": None,
        "z": None,
    }
    asked["tools"][0]["function"]["parameters"]["properties"]["a"]["default"] = None
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(asked), encoding="utf-8")
    (record,) = records_of(rows_of(str(path)), "f", read_record)
    assert record.answers == [[{"name": "f", "arguments": {"a": None}}]]
    described = record.tools[0]["function"]["parameters"]["properties"]["a"]
    assert described == {"type": "string", "default": None}
