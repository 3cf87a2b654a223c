"""The reference kept in a folder serves every rank, whichever it was that computed it."""

from __future__ import annotations

import json

from tests.programs import reference_cache_two_ranks as program
from tests.programs.launch import run_on_ranks


def test_after_the_first_epoch_every_sample_is_served_on_two_ranks(
    language_model_folder, safety_files, tmp_path
) -> None:
    """Each rank kept its own, and was dealt samples of the other's in every epoch."""
    arguments = [str(language_model_folder), json.dumps(safety_files), str(tmp_path)]
    run_on_ranks(2, program.__name__, arguments, tmp_path)
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    first, second = ranks
    assert first["reports"] == second["reports"]
    rates = [report["reference_cache/hit_rate"] for report in first["reports"]]
    assert len(rates) == program.EPOCHS
    assert rates[0] < 0.6  # The sanity check's and padding's.
    assert rates[1:] == [1.0, 1.0]
    sizes = [report["reference_cache/bytes"] for report in first["reports"]]
    assert sizes[0] == sizes[1] == sizes[2] > 10_000
    for rank in ranks:
        assert rank["logged"]["reference_cache/hit_rate"] == 1
        assert rank["error"] < 1e-4
    assert first["compared"] + second["compared"] >= 2 * 10
    assert first["files"] == second["files"]
    assert len(first["files"]) == 10 + 4  # Benign prompts, trained on and held out.
