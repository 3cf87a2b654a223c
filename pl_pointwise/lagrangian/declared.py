"""Constraints and formulations as a module declares them: objects, or their plain form."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from inspect import isabstract
from typing import Any

from ..constraint import Constraint
from ..formulations import Formulation
from ..plain import from_plain
from .terms import OBJECTIVE, require_names


def formulation_from(
    config: Formulation | Mapping[str, Any] | None,
) -> Formulation | None:
    """The formulation behind ``{class_path, init_args}``; no other class is built."""
    if config is None or isinstance(config, Formulation):
        return config
    path = config.get("class_path") if isinstance(config, Mapping) else None
    if not isinstance(path, str):
        raise ValueError(
            f"Not a formulation: {config!r}. Give an object such as Pointwise(alpha=1.0), a dict "
            "of them by constraint, or None; in YAML {class_path, init_args}."
        )
    kind = known_class(path) or _defined_within(path)
    if kind is None or not issubclass(kind, Formulation) or isabstract(kind):
        raise ValueError(
            f"Unknown formulation class {path!r}: write pl_pointwise.formulations.Pointwise, for "
            "one; of your own import the module first."
        )
    built: Formulation = kind(**dict(config.get("init_args") or {}))
    return built


def _defined_within(path: str) -> type[Formulation] | None:
    """The formulation of this path that stands in a function or a class, where no import goes."""
    by_path = {
        f"{kind.__module__}.{kind.__qualname__}": kind for kind in _below(Formulation)
    }
    return by_path.get(path)


def _below(kind: Any) -> Iterator[type[Formulation]]:
    """The classes that derive from one, at any depth."""
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


def known_class(path: str) -> type | None:
    """Returns the model, data or formulation of a name, if it ships or is loaded already."""
    # PointwiseLoss needs none.
    from lightning.pytorch import LightningDataModule, LightningModule

    module, _, name = path.rpartition(".")
    if module.partition(".")[0] == __name__.partition(".")[0]:
        with suppress(ImportError):
            importlib.import_module(module)
    named = getattr(sys.modules.get(module), name, None)
    kinds = (LightningModule, LightningDataModule, Formulation)
    if not (isinstance(named, type) and issubclass(named, kinds)):
        return None
    # Lightning's own modules for demonstrations are no task.
    return (
        None
        if named.__module__.startswith(("lightning.", "pytorch_lightning."))
        else named
    )


def formulations_from(
    formulation: Formulation | Mapping[str, Any] | None,
    constraints: Mapping[str, Constraint],
) -> dict[str, Formulation]:
    """The formulation of every constraint by name; empty for plain training."""
    if formulation is None:
        return {}
    if not isinstance(formulation, Mapping) or "class_path" in formulation:
        formulation = dict.fromkeys(constraints, formulation)
    require_names("formulation", formulation, constraints)
    built = dict[str, Formulation]()
    for name, config in formulation.items():
        of_constraint = formulation_from(config)
        if of_constraint is None:
            continue  # This constraint is only measured.
        if constraints[name].is_equality:
            of_constraint = of_constraint.for_equality()
        built[name] = of_constraint
    return built


def declared_constraints(
    constraints: Mapping[str, Any], evaluation_constraints: Mapping[str, Any] | None
) -> tuple[dict[str, Constraint], dict[str, Constraint]]:
    """The constraints of training and of evaluation by name, also from their plain form."""
    training = _constraints_by_name(constraints)
    evaluation = _constraints_by_name(evaluation_constraints or {})
    for name in training:
        if name == OBJECTIVE or "/" in name:  # Both would be other keys of the log.
            raise ValueError(
                f"{name!r}: name a constraint without a slash, and not {OBJECTIVE!r}."
            )
    require_names("evaluation_constraints", evaluation, training, partial=True)
    return training, {**training, **evaluation}


def _constraints_by_name(constraints: Any) -> dict[str, Constraint]:
    if not isinstance(constraints, Mapping):
        raise ValueError(
            f"constraints={constraints!r}: give a dict of constraints by name, such as "
            '{"fit": Constraint(at_most=0.1)}.'
        )
    return {
        str(name): from_plain(Constraint, declared)
        for name, declared in constraints.items()
    }
