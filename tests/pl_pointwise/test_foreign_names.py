"""What a stranger's configuration would have the parser import is named, and nothing imported."""

from __future__ import annotations

from typing import Any

import pytest

from pl_pointwise.foreign_names import foreign_names


@pytest.mark.parametrize(
    "arguments",
    [
        {"formulation": "os.mkdir"},
        {"formulation": {"prefer": "{class_path: this.Boom}"}},
        {"policy": {"template_arguments": [{"class_path": "subprocess.Popen"}]}},
        {"formulation": "pl_pointwise.cli.os.mkdir"},
    ],
)
def test_a_class_that_does_not_ship_is_named(arguments: dict[str, Any]) -> None:
    assert list(foreign_names({"class_path": "pl_pointwise.Pointwise", "init_args": arguments}))


def test_texts_and_shipped_classes_are_not() -> None:
    relaxed = {"class_path": "pl_pointwise.Relaxed", "init_args": {"beta": 1.0, "cost": "linear"}}
    policy = {"model_name": "org/a.b", "template_arguments": {"style": "a.b"}, "scale": "1.5"}
    assert list(foreign_names({"formulation": {"prefer": relaxed}, "policy": policy})) == []
