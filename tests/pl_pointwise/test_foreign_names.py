"""What a stranger's configuration would have the parser import is named, and nothing imported."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise import PointwiseModule
from pl_pointwise.foreign_names import foreign_names

RELAXED = {"class_path": "pl_pointwise.Relaxed", "init_args": {"beta": 1.0, "cost": "linear"}}


def names_in(arguments: dict[str, Any]) -> list[str]:
    config = {"class_path": "pl_pointwise.tasks.ConversationModule", "init_args": arguments}
    return list(foreign_names(config, PointwiseModule))


@pytest.mark.parametrize(
    "arguments",
    [
        {"formulation": "evil.Boom"},
        {"formulation": {"class_path": "evil.Boom"}},
        {"formulation": {"prefer": "{class_path: evil.Boom}"}},
        {"policy": {"template_arguments": {"x": {"class_path": "evil.Boom"}}}},
        {"policy": {"template_arguments": {"class_path": "evil.Boom"}}},
    ],
)
def test_a_class_that_does_not_ship_is_named(arguments: dict[str, Any]) -> None:
    assert names_in(arguments)


def test_texts_and_shipped_classes_are_not() -> None:
    policy = {"model_name": "org/a.b", "template_arguments": {"style": "a.b"}}
    assert names_in({"formulation": {"prefer": RELAXED}, "policy": policy}) == []
    assert names_in({"formulation": "pl_pointwise.Pointwise", "prefer_tolerance": -1.0}) == []
