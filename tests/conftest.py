"""What keeps the whole set quick on two cores, and one test from another."""

from __future__ import annotations

import gc
import logging
import os

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


def pytest_collection_finish() -> None:
    """What is imported by now stays, so a garbage collection, one at least per fit, skips it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forgets the seed that an earlier test left in the environment: orders of samples follow it.

    A hook and no fixture, because fixtures of a whole module would be set up before it.
    """
    os.environ.pop("PL_GLOBAL_SEED", None)
