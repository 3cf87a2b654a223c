"""λ of before under the formulations of now: kept where it fits, dropped, or refused."""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import TrainingError
from ..formulations import Formulation
from ..multipliers import Multipliers
from .checks import Warn
from .scopes import Scope


def fit_tables(
    multipliers: Multipliers,
    formulations: Mapping[str, Formulation],
    scopes: Mapping[str, Scope],
    warn: Warn,
    remedy: str,
) -> None:
    """Fits the tables to the formulations of now.

    Kept under another formulation of the same scope; dropped, with a warning, without one.

    Args:
        multipliers: those of before, set ones included.
        formulations, scopes: as declared, and what they act on, by constraint.
        warn: takes a warning.
        remedy: how a door starts the multipliers of {name!r} again.

    Raises:
        TrainingError: one λ for a constraint where each sample has one, or the other way round;
            a λ below 0 of an inequality.
    """
    # Set before a checkpoint was loaded, which has its own.
    for name in set(multipliers).intersection(multipliers.pending()):
        warn(f'Multipliers of "{name}" are the checkpoint\'s, not those that were set.')
        del multipliers.pending()[name]
    for name in [*multipliers, *multipliers.pending()]:
        formulation = formulations.get(name)
        dimensions = None if formulation is None else scopes[name].dimensions
        if formulation is None or dimensions is None:
            what = "no such constraint" if formulation is None else repr(formulation)
            warn(f'Multipliers of "{name}" are dropped: this module has {what}.')
            multipliers.reset(name)
            continue
        table = multipliers.get(name)
        if table is None:
            # Its shape is not known before the first step, its sign is.
            table = multipliers.pending()[name]
        elif (table.dim() == 2) != (dimensions == 2):
            kind = "sample" if table.dim() == 2 else "constraint"
            raise TrainingError(
                f'Constraint "{name}": its multipliers are one per {kind}, and those of '
                f"{formulation} are not. Start them again from 0: "
                f"{remedy.format(name=name)}."
            )
        if not formulation.signed and (table < 0).any():
            raise TrainingError(
                f'Constraint "{name}" has multipliers below 0, which only an equality has. '
                f"Set others, or start them from 0: {remedy.format(name=name)}."
            )
