"""A first run on one's own machine leaves something to go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pl_pointwise.configs import packaged_configs


@pytest.mark.parametrize("overlay", ["reranker/local", "safety/local", "conversation/example"])
def test_local_configurations_log_validate_and_keep_a_checkpoint(overlay: str) -> None:
    trainer: dict[str, Any] = {}
    for name in (overlay.partition("/")[0], overlay):
        (path,) = packaged_configs()[name]
        trainer |= yaml.safe_load(Path(path).read_text())["trainer"]
    assert trainer.get("logger") is None  # The command line's: a CSV file.
    assert trainer.get("enable_checkpointing", True)
    assert trainer.get("limit_val_batches", 1.0) == 1.0
