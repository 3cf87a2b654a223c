"""Preference data, for whatever model they are used with."""

from __future__ import annotations

from pathlib import Path

import pytest

from pl_pointwise.tasks import When2CallDataModule
from tests.tasks.conftest import make_data, written_files
from tests.tasks.when2call.conftest import preference_rows


@pytest.fixture
def data(tmp_path: Path) -> When2CallDataModule:
    """Six training prompts and two held-out ones."""
    rows = preference_rows(8)
    files = written_files(tmp_path, {"train_file": rows[:12], "val_file": rows[12:]})
    return make_data(
        When2CallDataModule, None, files, group_rejected=True, batch_size=4
    )
