"""Two ranks with batches of two do what one rank does with batches of four; gloo, on the CPU.

The reference policy is the model with its adapters off, so every step turns adapters off and on
again under DDP, which must still average their gradients.
"""

from __future__ import annotations

import pytest

from tests.programs import when2call_two_ranks as two_ranks
from tests.programs.task_ranks import two_and_one


def test_two_ranks_train_as_one(language_model_folder, when2call_files, tmp_path) -> None:
    folders = (tmp_path, tmp_path)
    two, one = two_and_one(two_ranks, language_model_folder, when2call_files, folders)
    for name in ("mcq/macro_f1", "test/kl", "train/rejected/cvar95", "train/pairwise_accuracy"):
        assert two[name] == pytest.approx(one[name], abs=1e-3)
