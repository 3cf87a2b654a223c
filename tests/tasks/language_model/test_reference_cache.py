"""How large the reference's cache is and how often it serves."""

from __future__ import annotations

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
