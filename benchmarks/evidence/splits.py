"""Records of the tasks, split three ways: training, validation and test.

The test part is the same for every seed. What remains is divided into training and validation anew
by each seed. Records of one group (a query, a prompt, a module) stay on one side.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pl_pointwise.tasks.reranker.data import docstring_records

Grouped = tuple[str, dict[str, Any]]
"""A record and the group it belongs to."""


@dataclass(frozen=True)
class Sizes:
    """Records in each part.

    Attributes:
        train, validation, test: the most records of each.
        per_group: the most records of one group.
    """

    train: int
    validation: int
    test: int
    per_group: int = 1_000_000


def split(
    records: Sequence[Grouped], sizes: Sizes, seed: int
) -> dict[str, list[dict[str, Any]]]:
    """Returns the records of "train", "validation" and "test".

    The parts are filled group by group. The test part does not depend on the seed.

    Raises:
        ValueError: too few records for a part to have any.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for group, record in records:
        groups.setdefault(group, []).append(record)
    for group, members in groups.items():
        random.Random(group).shuffle(members)
        groups[group] = members[: sizes.per_group]
    names = sorted(groups)
    random.Random("test").shuffle(names)
    parts = {"test": _fill(names, groups, sizes.test)}
    random.Random(f"seed {seed}").shuffle(names)
    parts["validation"] = _fill(names, groups, sizes.validation)
    parts["train"] = _fill(names, groups, sizes.train)
    for name, part in parts.items():
        if not part:
            raise ValueError(
                f"{len(records)} records in {len(groups)} groups: none for {name}."
            )
    return parts


def _fill(
    names: list[str], groups: Mapping[str, list[Any]], size: int
) -> list[dict[str, Any]]:
    """Returns ``size`` records of the first groups, which are taken out of ``names``."""
    part: list[dict[str, Any]] = []
    while names and len(part) < size:
        part += groups[names.pop(0)]
    return part[:size]


# Records of the tasks -----------------------------------------------------------------------------


def corpus(negatives: int) -> list[Grouped]:
    """The embedded corpus, by module; long queries, which leave no room for a passage, left out."""
    records = docstring_records(negatives)
    return [(each["query_type"], each) for each in records if len(each["query"]) <= 80]


def msmarco(folder: Path) -> list[Grouped]:
    """MS MARCO's records, by query."""
    files = (folder / "msmarco" / f"{name}.jsonl" for name in ("train", "validation"))
    return [(row["query"], row) for file in files for row in _lines(file)]


def when2call(folder: Path, longest_prompt: int, longest_answer: int) -> list[Grouped]:
    """When2Call's preference records and its questions, by prompt; one record an answer pair.

    Of a question the right answer is the chosen one and each other is rejected. Tools are written
    without their descriptions, as a prompt is what a step on two cores costs. Prompts of more than
    ``longest_prompt`` characters, tools included, are left out, and pairs with an answer of more
    than ``longest_answer``.
    """
    rows = [*_lines(folder / "when2call" / "train_pref.jsonl")]
    for row in _lines(folder / "when2call" / "test_mcq.jsonl"):
        right = row["correct_answer"]
        for wrong, answer in row["answers"].items():
            if wrong != right:
                rows.append(
                    {
                        "tools": row["tools"],
                        "messages": [{"role": "user", "content": row["question"]}],
                        "chosen_response": _said(row["answers"][right]),
                        "rejected_response": _said(answer),
                        "category": right,
                        "rejected_category": wrong,
                    }
                )
    found = []
    for row in rows:
        tools = [
            json.dumps(_without_descriptions(json.loads(tool))) for tool in row["tools"]
        ]
        prompt = json.dumps([tools, row["messages"]])
        answers = [
            row[f"{each}_response"]["content"] for each in ("chosen", "rejected")
        ]
        if len(prompt) <= longest_prompt and max(map(len, answers)) <= longest_answer:
            found.append((prompt, row | {"tools": tools}))
    return found


def _without_descriptions(value: Any) -> Any:
    if isinstance(value, dict):
        # A parameter of that name has a schema, a mapping; a description is a text.
        return {
            name: _without_descriptions(each)
            for name, each in value.items()
            if name != "description" or isinstance(each, dict)
        }
    return (
        [_without_descriptions(each) for each in value]
        if isinstance(value, list)
        else value
    )


def _said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def benign(folder: Path, answer_characters: int) -> list[Grouped]:
    """Alpaca's records, by prompt, each answer cut after whole sentences.

    Long prompts, and answers whose first sentence is too long, are left out.
    """
    rows = []
    for row in _lines(folder / "alpaca" / "alpaca_longest.jsonl"):
        prompt = row["instruction"] + row["input"]
        answer = first_sentences(row["output"], answer_characters)
        if len(prompt) <= 150 and len(answer) <= answer_characters:
            rows.append((prompt, row | {"output": answer}))
    return rows


def unsafe(folder: Path) -> list[Grouped]:
    """Unsafe prompts, each a group; long ones left out."""
    rows = _lines(folder / "safety" / "refusals.jsonl")
    return [
        (row["prompt"], {"prompt": row["prompt"]})
        for row in rows
        if len(row["prompt"]) <= 120
    ]


def first_sentences(text: str, characters: int) -> str:
    """Returns as many sentences as fit, at least one.

    >>> first_sentences("One. Two is longer. Three.", 20)
    'One. Two is longer.'
    """
    sentences = re.split(r"(?<=[.!?])\s+", text.strip())
    found = sentences[0]
    for sentence in sentences[1:]:
        if len(found) + 1 + len(sentence) > characters:
            break
        found += " " + sentence
    return found


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


# Files --------------------------------------------------------------------------------------------


def write_splits(
    kinds: Mapping[str, tuple[Sequence[Grouped], Sizes]], folder: Path, seed: int
) -> dict[str, dict[str, Path]]:
    """Writes the parts of every kind of record as JSON lines, once.

    The folder's name holds a digest of records and sizes, so that a run on other records is another
    configuration and is run again.

    Returns: the files by part and kind.
    """
    described = json.dumps(
        {kind: [rows, asdict(s)] for kind, (rows, s) in kinds.items()}
    )
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    below = folder / digest / f"seed-{seed}"
    below.mkdir(parents=True, exist_ok=True)
    files: dict[str, dict[str, Path]] = {}
    for kind, (records, sizes) in kinds.items():
        for part, rows in split(records, sizes, seed).items():
            path = below / f"{kind}-{part}.jsonl"
            files.setdefault(part, {})[kind] = path
            if not path.is_file():
                text = "".join(
                    json.dumps(row, ensure_ascii=False) + "\n" for row in rows
                )
                path.write_text(text, encoding="utf-8")
    return files
