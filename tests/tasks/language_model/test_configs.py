"""What holds of the packaged configurations of the language tasks."""

from __future__ import annotations

from inspect import signature
from pathlib import Path

import pytest
import yaml

import pl_pointwise
from pl_pointwise.configs import config_path
from tests.tasks.conftest import overlays

NAMES = [name for task in ("safety", "when2call", "conversation") for name in overlays(task)]
MODELS = {name: yaml.safe_load(Path(config_path(name)).read_text())["model"] for name in NAMES}
FORMULATIONS = {
    name: formulation
    for name, model in MODELS.items()
    if (formulation := model["init_args"].get("formulation"))
}


@pytest.mark.parametrize("name", FORMULATIONS)
def test_overlay_states_every_argument_of_its_formulation(name) -> None:
    """LightningCLI merges init_args, so an argument left out would keep another method's value."""
    config = FORMULATIONS[name]
    kind = getattr(pl_pointwise, config["class_path"].rpartition(".")[2])
    assert set(config["init_args"]) == set(signature(kind).parameters)


def test_there_are_overlays_to_look_at() -> None:
    assert {"safety/relaxed", "when2call/cvar", "when2call/orca", "safety/pku"} <= set(FORMULATIONS)


@pytest.mark.parametrize("name", NAMES)
def test_no_method_states_a_tolerance(name) -> None:
    """One would replace those of TASK/paper, or a user's own, given before it."""
    if Path(config_path(name)).parent.name == "methods":
        init = MODELS[name]["init_args"]
        assert not [key for key in (*init, *init.get("evaluation", {})) if "tolerance" in key]
