"""Files whose layout is another than one record a line: read, or refused with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import records_of, rows_of
from pl_pointwise.tasks.conversation.records import read_record

ROW = {"prompt": "Who?", "answer": "Ann."}


def read(path: Path) -> list[Any]:
    return [
        record.answers for record in records_of(rows_of(str(path)), "f", read_record)
    ]


@pytest.mark.parametrize("orient", ["columns", "index", "split"])
def test_pandas_other_layouts_are_named(orient: Any, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    pd.DataFrame([ROW, ROW]).to_json(path, orient=orient)
    said = "orient='records'" if orient != "index" else "of no schema"
    with pytest.raises(DataError, match=said):
        read(path)
    pd.DataFrame([ROW, ROW]).to_json(path, orient="records")
    assert read(path) == [["Ann."], ["Ann."]]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "f.json",
            json.dumps({"train": [ROW], "test": [ROW]}),
            "lists of records in 'train', 'test'",
        ),
        (
            "f.jsonl",
            json.dumps([ROW]),
            "line 1: the record is a list.* name a file of one list .json",
        ),
        (
            "f.csv",
            "prompt,answer\nWho?,Ann, of course\n",
            "record 1: .* more cells than .* in quotes",
        ),
        ("f.csv", "sep=,\nprompt,answer\na,b\n", "first line is .sep=.* take it out"),
        (
            "f.csv",
            "Prompt, Answer\na,b\n",
            "record 1: .* by other names. Write them in lower case",
        ),
    ],
)
def test_what_to_do_is_said(name: str, text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        read(path)


def test_a_record_of_lists_is_one_and_an_index_of_pandas_is_no_text(
    tmp_path: Path,
) -> None:
    turns = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "Ann."},
    ]
    path = tmp_path / "f.json"
    path.write_text(json.dumps({"messages": turns}))
    assert read(path) == [["Ann."]]
    table = tmp_path / "f.parquet"
    pd.DataFrame([ROW], index=["x"]).to_parquet(table)
    assert read(table) == [["Ann."]]
