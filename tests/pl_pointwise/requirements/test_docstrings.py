"""Examples in docstrings of comparisons and requirements run."""

from __future__ import annotations

import doctest

import pytest

from pl_pointwise import certificates
from pl_pointwise.compare import plots, runs, tables
from pl_pointwise.requirements import p_values, requirement, selection, tolerances

MODULES = [certificates, plots, runs, tables, p_values, requirement, selection, tolerances]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_the_examples_in_the_docstrings_run(module) -> None:
    outcome = doctest.testmod(module)
    assert outcome.attempted
    assert not outcome.failed
