"""Two ranks with one prompt each do what one rank does with two; gloo, on the CPU.

A rank's prompt is of one kind, so in every step some rank has no sample of some term.
"""

from __future__ import annotations

import json

import pytest

from tests.programs import reference_cache_two_ranks as cached
from tests.programs.launch import run_on_ranks
from tests.programs.safety_two_ranks import two_and_one


def test_two_ranks_train_test_and_answer_as_one(
    language_model_folder, safety_files, tmp_path
) -> None:
    folders = (tmp_path / "two", tmp_path / "one")
    for folder in folders:
        folder.mkdir()
    two, one = two_and_one(language_model_folder, safety_files, folders)
    for name, value in one.items():
        assert two[name] == pytest.approx(value, abs=1e-3), name
    written = [(folder / "answers/test.jsonl").read_text() for folder in folders]
    rows = [[json.loads(line) for line in text.splitlines()] for text in written]
    assert [row["index"] for row in rows[0]] == list(range(6))
    assert rows[0] == rows[1]


def test_after_the_first_epoch_every_sample_is_served_on_two_ranks(
    language_model_folder, safety_files, tmp_path
) -> None:
    """Each rank kept its own, and was dealt samples of the other's in every epoch."""
    arguments = [str(language_model_folder), json.dumps(safety_files), str(tmp_path)]
    run_on_ranks(2, cached.__name__, arguments, tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    first, second = ranks
    assert first["reports"] == second["reports"]
    rates = [report["reference_cache/hit_rate"] for report in first["reports"]]
    assert len(rates) == cached.EPOCHS
    assert rates[0] < 0.6  # The sanity check's and padding's.
    assert rates[1:] == [1.0, 1.0]
    sizes = [report["reference_cache/bytes"] for report in first["reports"]]
    assert sizes[0] == sizes[1] == sizes[2] == first["bytes"] + second["bytes"] > 10_000
    for rank in ranks:
        assert rank["logged"]["reference_cache/hit_rate"] == 1
        assert rank["error"] < 1e-4
    assert first["compared"] + second["compared"] >= 2 * 10
    assert first["files"] == second["files"]
    assert len(first["files"]) == 10 + 4  # Benign prompts, trained on and held out.
