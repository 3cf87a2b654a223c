"""What keeps the whole set quick on two cores, and one test from another."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile(
    "quick",
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("quick")


@pytest.fixture(autouse=True)
def quiet_lightning() -> None:
    """Lightning's notices about devices and workers are not what a failing test needs to show."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(autouse=True)
def no_global_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``seed_everything`` of an earlier test stays in the environment, and orders follow it."""
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
