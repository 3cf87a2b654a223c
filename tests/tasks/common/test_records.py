"""One set of records in every kind of file, and what of a file is refused by place and field."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow.ipc
import pytest

from pl_pointwise.errors import DataError
from pl_pointwise.tasks.common.records import records_of, rows_of, without_padding
from pl_pointwise.tasks.conversation.records import read_record
from pl_pointwise.tasks.language_model.text.records import Record


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"name": name, "parameters": {"type": "object", "properties": properties}}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"name": name, "arguments": arguments}]}


def asking(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


UNIT = {"type": "string", "enum": ["C", "F"]}
ROWS: list[dict[str, Any]] = [
    {
        "messages": [*asking("a"), call("f", x="1")],
        "tools": [tool("f", x={"type": "string"})],
    },
    {
        "messages": [*asking("b"), call("g", y=2, deep={"z": [{"v": 1}, {"w": 2}]})],
        "tools": [tool("g", y={"type": "integer", "default": None}), tool("h", u=UNIT)],
    },
    {"messages": [*asking("c"), call("k")], "tools": [tool("k", x=UNIT)]},
    {
        "messages": [
            *asking("d"),
            {"role": "assistant", "content": "No.", "refusal": None},
        ]
    },
]


def read(path: Path) -> list[Record]:
    return records_of(rows_of(str(path)), path.name, read_record)


def contents(records: list[Record]) -> list[Any]:
    return [(each.messages, each.tools, each.responses) for each in records]


def test_every_kind_of_file_gives_the_same_records(tmp_path: Path) -> None:
    """Arrow fills the tools and arguments of one column with nulls; they are not trained on."""
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    whole = json.dumps({"data": ROWS}, indent=1).encode()
    for name, content in {
        "a.jsonl": lines,
        "lines.json": lines,
        "marked.jsonl": b"\xef\xbb\xbf" + lines,
        "list.json": json.dumps(ROWS, indent=1).encode(),
        "data.json": b"\xef\xbb\xbf" + whole,
        "a.jsonl.gz": gzip.compress(lines),
        "a.JSON.gz": gzip.compress(whole),
    }.items():
        (tmp_path / name).write_bytes(content)
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    next((tmp_path / "saved").glob("*.arrow")).rename(tmp_path / "stream.arrow")
    with pyarrow.ipc.new_file(tmp_path / "file.arrow", table.data.table.schema) as file:
        file.write_table(table.data.table)
    paths = [path for path in sorted(tmp_path.iterdir()) if path.is_file()]
    assert len(paths) == 10
    expected = contents(read(tmp_path / "a.jsonl"))
    assert expected[1][1] == ROWS[1]["tools"]
    for path in paths:
        assert contents(read(path)) == expected, path.name
    of_hub = (
        (f"hub, record {n}", without_padding(row))
        for n, row in enumerate(table, start=1)
    )
    assert contents(records_of(of_hub, "hub", read_record)) == expected
    (tmp_path / "one.json").write_text(json.dumps(ROWS[0], indent=1))
    assert contents(read(tmp_path / "one.json")) == expected[:1]


@pytest.mark.parametrize("delimiter", [",", "\t"], ids=["csv", "tsv"])
@pytest.mark.filterwarnings("default:.*fields cells beyond the header of 1 of 3")
def test_cells_of_a_table_are_what_they_say(delimiter: str, tmp_path: Path) -> None:
    path = tmp_path / ("a.csv" if delimiter == "," else "a.TSV")
    responses = [{"role": "refuse"}, {"role": "avoid", "content": "b", "tolerance": -3}]
    tables = {
        "answers": [
            ["prompt", "answer", "role", "tolerance", "around", "tools"],
            ["Say\n“a”", "a, b", "", "", "", ""],
            ["p", "b", "prefer", "-0.5", "", json.dumps([tool("f")])],
            ["p", "c", "forget", "", "-2", ""],
        ],
        "lists": [["prompt", "responses"], ["p", json.dumps(responses)]],
    }
    found = []
    for cells in tables.values():
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file, delimiter=delimiter).writerows(cells)
        found += records_of(rows_of(str(path)), path.name, read_record)
    assert [
        [(each.role, each.tolerance) for each in record.responses] for record in found
    ] == [
        [("reference", None)],
        [("prefer", -0.5)],
        [("forget", -2.0)],
        [("refuse", None), ("avoid", -3.0)],
    ]
    assert (found[0].messages[0]["content"], found[1].tools) == (
        "Say\n“a”",
        [tool("f")],
    )


def test_a_table_of_which_cells_would_be_lost_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    for text, said in (
        ("a,b,a\n1,2,3\n", ": .*two columns of one name"),
        (
            'prompt,answer\na,b\nc,"d\ne,f\n',
            ", after record 1: .*unexpected end of data",
        ),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=rf"a\.csv{said}"):
            records_of(rows_of(str(path)), path.name, read_record)
    path.write_text("prompt,answer\na," + "b" * 200_000)  # csv's own limit is 131,072
    assert len(records_of(rows_of(str(path)), path.name, read_record)) == 1


GOOD = '{"prompt": "Hi", "answer": "yes"}'


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"prompt": "a \\ud83d b", "answer": "c"}', "half a character stands behind"),
        ('{"prompt": "a", "answer": "c", "\\ud83d": 1}', "half a character stands behind"),
        ('{"prompt": "a", "answer": "c", "tools": "[{\\"name\\": \\"\\\\ud83d\\"}]"}',
         'field "tools" is not readable JSON (half a character'),
        ('{"prompt": "a", "answer": "c", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
         "too many lists and objects"),
    ],
    ids=["text", "key", "JSON in a text", "deepest"],
)  # fmt: skip
def test_a_line_that_nothing_can_render_is_refused_or_skipped(
    bad: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n{bad}\n")
    for skip in (None, False):
        with pytest.raises(DataError, match=f"a.jsonl, line 2: .*{re.escape(said)}"):
            records_of(rows_of(str(path)), path.name, read_record, skip)
    with pytest.warns(UserWarning, match="left out 1 of 2 records"):
        assert (
            len(
                records_of(
                    rows_of(str(path)), path.name, read_record, skip_invalid=True
                )
            )
            == 1
        )
    path = tmp_path / "a.json"
    path.write_text(f"[{GOOD}, {bad}]")
    with pytest.raises(DataError, match=r"a\.json"):
        records_of(rows_of(str(path)), path.name, read_record)


def test_an_emoji_of_two_halves_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '{"prompt": "\\ud83d\\ude00", "answer": "\u00e9"}'
    )
    assert read(tmp_path / "a.jsonl")[0].messages == asking("\U0001f600")


@pytest.mark.parametrize("name", ["a.txt", "a", "a.jsonl.zip", "a.xlsx"])
def test_a_file_of_another_ending_says_which_are_read(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(GOOD)
    endings = r"\.jsonl, \.json, \.csv, \.tsv, \.parquet, \.arrow, or these and \.gz"
    with pytest.raises(DataError, match=f"{name}: cannot be read .*{endings}"):
        read(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["a.jsonl.gz", "a.json.gz", "a.csv.gz", "a.parquet", "a.arrow"]
)
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(500)
    for content in (noise, gzip.compress(f"{GOOD}\n{noise.hex()}".encode())[:-100]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}.*: cannot be read"):
            read(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n{"a": 1, "b": {"c": 2, "c": 3}}\n',
            r"line 2: .*'c' twice",
        ),
        ("a.json", '[{"a": 1, "a": 2}]', r"a\.json: .*'a' twice"),
        ("a.json", '{"a": 1, "a": 2}', r"a\.json: .*'a' twice"),
    ],
)
def test_a_key_that_stands_twice_is_refused(
    name: str, text: str, said: str, tmp_path: Path
) -> None:
    """Of the two values Python keeps the last, and nobody would know."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        records_of(rows_of(str(path)), name, lambda row, where: dict(row))
