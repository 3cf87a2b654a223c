"""A file that sets a formulation states every argument of it.

LightningCLI merges ``init_args`` of one class: an α or η that an overlay leaves out stays the base
file's, in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import pl_pointwise
from pl_pointwise import Formulation, tasks
from pl_pointwise.command_line.configs import (
    by_kind,
    packaged_comparisons,
    packaged_configs,
    text_of,
)
from pl_pointwise.compare.runs import Comparison
from pl_pointwise.lagrangian.declared import formulation_from

SHIPPED = sorted(Path(tasks.__path__[0]).glob("*/configs/**/*.yaml"))


def formulations_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping that names one of our formulations, at any depth."""
    if isinstance(value, dict):
        name = str(value.get("class_path", "")).rpartition(".")[2]
        kind = getattr(pl_pointwise, name, None)
        if isinstance(kind, type) and issubclass(kind, Formulation):
            yield value
        for entry in value.values():
            yield from formulations_in(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from formulations_in(entry)


def test_formulation_of_a_packaged_configuration_states_every_argument() -> None:
    found = set()
    for path in SHIPPED:
        for config in formulations_in(yaml.safe_load(path.read_text())):
            kind = type(formulation_from(config))
            stated = set(config.get("init_args", {}))
            arguments = set(inspect.signature(kind).parameters)
            assert stated == arguments, (
                f"{path}: under init_args of {kind.__name__} state too "
                f"{', '.join(sorted(arguments - stated))}, with the defaults: a file laid over "
                "another keeps what it does not state."
            )
            found.add(kind.__name__)
    public = [
        getattr(pl_pointwise, name)
        for name in pl_pointwise.__all__
        if name != "Formulation"
    ]
    assert found == {
        kind.__name__
        for kind in public
        if isinstance(kind, type) and issubclass(kind, Formulation)
    }


@pytest.mark.parametrize("task", sorted(by_kind()["base"]))
def test_a_tasks_numbers_are_those_of_the_shared_formulation(task: str) -> None:
    """Each is a number of an argument that the shared file states."""
    for name, parts in packaged_configs().items():
        if name.startswith(f"{task}/") and len(parts) == 2:
            read = [
                yaml.safe_load(text_of(part))["model"]["init_args"] for part in parts
            ]
            shared, own = (each["formulation"] for each in read)
            assert set(own) == {"init_args"}
            assert set(own["init_args"]) <= set(shared["init_args"])


@pytest.mark.parametrize("task", ["reranker", "safety", "when2call"])
def test_alpha_and_eta_are_the_fits_except_in_the_papers_methods(task: str) -> None:
    def formulation_of(method: str) -> Any:
        config = yaml.safe_load(text_of(packaged_configs()[f"{task}/{method}"][0]))
        return formulation_from(config["model"]["init_args"]["formulation"])

    for method in ("pointwise", "relaxed", "relaxed_linear"):
        found = formulation_of(method)
        assert (found.alpha, found.dual_lr) == ("adaptive", None)
    for method in ("paper_pointwise", "paper_relaxed"):
        found = formulation_of(method)
        assert 0 < found.dual_lr < 2 * found.alpha
        assert not found.adaptive


@pytest.mark.parametrize("name", packaged_comparisons())
def test_every_method_of_a_packaged_comparison_can_be_planned(
    name: str, tmp_path: Path
) -> None:
    """The longest comparisons run in the slow set alone."""
    runs = Comparison([name.split("/")[0]], tmp_path, name).runs
    assert runs


@pytest.mark.parametrize(
    "overlay", ["reranker/local", "safety/local", "conversation/example"]
)
def test_a_first_run_on_ones_own_machine_logs_validates_and_keeps_a_checkpoint(
    overlay: str,
) -> None:
    parts = [
        packaged_configs()[name][0] for name in (overlay.partition("/")[0], overlay)
    ]
    base, local = (yaml.safe_load(text_of(part))["trainer"] for part in parts)
    off = {"logger": None, "enable_checkpointing": True, "limit_val_batches": 1.0}
    assert off | base | local == base | local | off
