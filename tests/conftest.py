"""What keeps the whole set quick on two cores, and one test from another."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest
import torch
from hypothesis import HealthCheck, settings
from lightning.fabric.utilities import registry

USES = TemporaryDirectory(prefix="uses-")
CORE_ALONE = find_spec("transformers") is None
"""Whether the extras are not installed, as in `make test-minimal`: what imports one is skipped."""
collect_ignore = ["benchmarks", "tasks"] if CORE_ALONE else []

torch.set_num_threads(1)
# Every Trainer asks every installed package for callbacks.
registry.entry_points = functools.cache(registry.entry_points)
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

    And what earlier tests certified with, which is never on record in the user's folder.

    A hook and no fixture, because fixtures of a whole module would be set up before it.
    """
    os.environ.pop("PL_GLOBAL_SEED", None)
    os.environ["PL_POINTWISE_USES"] = f"{USES.name}/{uuid4().hex}"


def skip_what_lacks_an_extra(report: Any, path: Path) -> None:
    said = report.longreprtext + report.capstdout + report.capstderr
    lacking = r"ImportError|ModuleNotFoundError|which is not installed: pip install"
    if CORE_ALONE and report.failed and re.search(lacking, said):
        report.outcome = "skipped"
        report.longrepr = (str(path), 0, "Skipped: takes what an extra brings")


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    outcome: Any = yield
    skip_what_lacks_an_extra(outcome.get_result(), collector.path)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    outcome: Any = yield
    skip_what_lacks_an_extra(outcome.get_result(), item.path)
