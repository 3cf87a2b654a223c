"""How large the reference's cache is and how often it serves."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pl_pointwise.tasks.language_model.reference import ReferenceCache
from pl_pointwise.tasks.language_model.scoring import ResponseScorer
from tests.tasks.language_model.test_scoring import make_batch

ALONE = SimpleNamespace(world_size=1)
TOKENS = 4 + 9 + 1 + 11 + 3 + 6  # of the batch's responses


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_size_and_rate_are_reported(dtype, on_disk, make_model, make_adapted, tmp_path) -> None:
    model = make_adapted(make_model("llama"))
    folder = tmp_path if on_disk else None
    cache = ReferenceCache(model, folder, dtype=dtype)
    assert cache.report(ALONE) == {"reference_cache/bytes": 0}
    scorer = ResponseScorer(model, method="chunked", cache=cache)
    scorer(make_batch())
    size = TOKENS * model.config.hidden_size * dtype.itemsize
    expected = {"reference_cache/hit_rate": 0.0, "reference_cache/bytes": size}
    assert cache.report(ALONE) == expected
    scorer(make_batch())
    assert cache.report(ALONE) == expected | {"reference_cache/hit_rate": 1.0}
    if on_disk:  # A later run finds it, with the files' headers.
        later = ReferenceCache(model, tmp_path, dtype=dtype)
        assert size < later.report(ALONE)["reference_cache/bytes"] < size + 6 * 200


def test_a_full_folder_is_named_once_and_training_goes_on(
    make_model, make_adapted, tmp_path, monkeypatch, caplog
) -> None:
    model = make_adapted(make_model("llama"))
    cache = ReferenceCache(model, tmp_path, dtype=torch.float32)

    def full(entry: object, path: Path) -> None:
        path.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pl_pointwise.tasks.language_model.reference.save_file", full)
    scorer = ResponseScorer(model, method="chunked", cache=cache)
    expected = ResponseScorer(model, method="chunked")(make_batch())
    for _ in range(2):
        torch.testing.assert_close(scorer(make_batch()).kl, expected.kl)
    assert cache.hits == 0
    assert cache.bytes == 0
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    (said,) = [r.getMessage() for r in caplog.records if "No space left" in r.getMessage()]
    assert "policy.reference_cache" in said
