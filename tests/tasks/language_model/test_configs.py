"""What holds of the packaged configurations of the language tasks."""

from __future__ import annotations

import pytest
import yaml

from pl_pointwise.command_line.configs import packaged_configs, text_of

TASKS = ("safety", "when2call", "conversation", "keep", "forget")


def stated(value: object) -> set[str]:
    """All keys of nested mappings."""
    if not isinstance(value, dict):
        return set()
    return {str(key) for key in value}.union(*map(stated, value.values()))


@pytest.mark.parametrize("task", TASKS)
def test_no_method_states_a_tolerance(task: str) -> None:
    """One would replace those of TASK/paper, or a user's own, given before it."""
    shown = [name.partition("/")[2] for name in packaged_configs() if name.startswith(f"{task}/")]
    assert {"pointwise", "average", "cvar"} <= set(shown)
    for name in shown:
        if name in ("paper", "practical", "orca", "pku", "greedy"):
            continue
        for part in packaged_configs()[f"{task}/{name}"]:
            assert not [key for key in stated(yaml.safe_load(text_of(part))) if "tolerance" in key]
