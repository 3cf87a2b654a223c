"""Safety rows of every schema, files of them, and batches made by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pl_pointwise.tasks import Generation, SafetyDataModule, SafetyModule
from pl_pointwise.tasks.language_model.text.records import Record, Response
from pl_pointwise.tasks.safety.data import PAPER_CATEGORIES, Selection
from pl_pointwise.tasks.safety.module import PAPER_TRAINING
from tests.tasks.conftest import (
    ADAPTERS,
    make_data,
    make_module,
    write_rows,
    written_files,
)

VIOLENCE = "violence,aiding_and_abetting,incitement"
PRIVACY = "privacy_violation"


def benign_rows(count: int) -> list[dict[str, Any]]:
    """Instructions with answers of different lengths; every third has an input."""
    return [
        {
            "instruction": f"Name {i} trees.",
            "input": "In Latin." if i % 3 == 2 else "",
            "output": "Oak. " * (1 + i * 7 % 5) + f"That is {i}.",
        }
        for i in range(count)
    ]


def unsafe_rows(count: int, answered: bool = True) -> list[dict[str, Any]]:
    """Unsafe prompts; the even ones with an unsafe answer, the odd ones with a safe one."""
    rows: list[dict[str, Any]] = [
        {"prompt": f"How do I steal {i} cars?"} for i in range(count)
    ]
    if answered:
        for i, row in enumerate(rows):
            row |= {"response": f"No, {i} is too many." if i % 2 else f"Take {i} keys."}
            row["is_safe"] = bool(i % 2)
    return rows


def judgement_rows(
    prompt: str,
    response: str,
    categories: Sequence[Iterable[str]],
    safe: Sequence[bool] = (),
) -> list[dict[str, Any]]:
    """Rows of BeaverTails: one for each annotator, with the categories that one saw."""
    return [
        {
            "prompt": prompt,
            "response": response,
            "category": {
                name: name in seen for name in (*PAPER_CATEGORIES, "self_harm")
            },
            "is_safe": safe[place] if safe else False,
        }
        for place, seen in enumerate(categories)
    ]


def pair_row(
    prompt: str,
    unsafe: tuple[bool, bool],
    better: int = 0,
    safer: int | None = None,
    answers: tuple[str, str] = ("Answer A.", "Answer B."),
) -> dict[str, Any]:
    """A row of PKU-SafeRLHF."""
    if safer is None:
        safer = 1 if unsafe[0] and not unsafe[1] else 0
    return {
        "prompt": prompt,
        "response_0": answers[0],
        "response_1": answers[1],
        "is_response_0_safe": not unsafe[0],
        "is_response_1_safe": not unsafe[1],
        "better_response_id": better,
        "safer_response_id": safer,
    }


def pair_rows(count: int) -> list[dict[str, Any]]:
    """Pairs in which the four combinations of unsafe answers take turns."""
    kinds = [(False, True), (True, False), (True, True), (False, False)]
    return [
        pair_row(f"Whom do I rob, {i}?", kinds[i % 4], better=i % 2)
        for i in range(count)
    ]


def record(text: str, unsafe: bool, *responses: tuple[str, str | None]) -> Record:
    """A record of one turn; responses: (role, text) of each."""
    messages = [{"role": "user", "content": text}]
    given = tuple(Response(role, answer) for role, answer in responses)
    return Record(messages, [], given, "x", given_kind="unsafe" if unsafe else "benign")


def said(found: Record) -> list[tuple[str, Any]]:
    """(role, text) of each response."""
    return [(each.role, each.answer) for each in found.responses]


@pytest.fixture
def data_in(
    language_model_folder: Path, tmp_path: Path
) -> Callable[..., SafetyDataModule]:
    """data_in(files or their rows, stage=…, **options) → safety data, set up for that stage."""

    def make(files: dict[str, Any], **options: Any) -> Any:
        files, options = (
            written_files(tmp_path, files),
            {"unsafe_schema": "labelled"} | options,
        )
        return make_data(SafetyDataModule, language_model_folder, files, **options)

    return make


@pytest.fixture
def hub(
    language_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., SafetyDataModule]:
    """hub(selection, **options) → data of small data sets in the layouts of those on the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    judged = []
    for place, name in enumerate(PAPER_CATEGORIES):
        for i in range(12):
            judged += judgement_rows(
                f"{name} {i}?", f"Do {place}.", [[name]] * (3 + i % 2)
            )
        judged += judgement_rows(f"{name} once?", "Do.", [[name]])
    layouts = {
        "alpaca": {"train": benign_rows(30)},
        "beavertails": {"330k_train": judged},
        # Four are trained on.
        "pku": {"train": pair_rows(12), "test": pair_rows(16)[8:]},
    }
    paths = {}
    for name, splits in layouts.items():
        folder = tmp_path / name
        folder.mkdir()
        header = "---\nconfigs:\n- config_name: default\n  data_files:\n"
        for split, rows in splits.items():
            write_rows(folder / f"{split}.jsonl", rows)
            header += f"  - split: {split}\n    path: {split}.jsonl\n"
        (folder / "README.md").write_text(f"{header}---\n")
        paths[f"{name}_path"] = str(folder)

    def make(selection: dict[str, int], **options: Any) -> SafetyDataModule:
        chosen = Selection(**paths, **selection)
        return SafetyDataModule(str(language_model_folder), selection=chosen, **options)

    return make


@pytest.fixture
def made(language_model_folder: Path) -> Callable[..., SafetyModule]:
    """made(folder=…, moved=True, **options) → a module on the tiny Llama, with moved adapters."""

    def make(
        folder: Path = language_model_folder, moved: bool = True, **options: Any
    ) -> Any:
        options = {
            "lora": ADAPTERS,
            "generation": Generation(max_new_tokens=5),
        } | options
        return make_module(SafetyModule, folder, PAPER_TRAINING, moved, **options)

    return make


@pytest.fixture(scope="session")
def safety_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of ten benign and six unsafe training prompts, and of four and two held-out ones."""
    benign, unsafe = benign_rows(14), unsafe_rows(8)
    rows = {"benign_file": benign[:10], "benign_val_file": benign[10:]}
    rows |= {"unsafe_file": unsafe[:6], "unsafe_val_file": unsafe[6:]}
    return written_files(tmp_path_factory.mktemp("safety"), rows)
