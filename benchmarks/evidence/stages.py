"""What the stages run: all settings to tune, the choice among them, the chosen ones to judge."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from .choice import Choice, Measured, best_of, choose, grouped
from .errors import MissingError
from .grids import Entry
from .study import Planned, Study, load, measured

TUNING_SEED = 0


def tune_runs(study: Study) -> list[Planned]:
    """Every setting of every method, measured on the validation part."""
    return study.runs(study.entries(), "tune", TUNING_SEED)


def tuned(study: Study) -> list[Measured]:
    """What the finished runs reached on the validation part; some may be missing."""
    found = (measured(study, planned) for planned in tune_runs(study))
    return [each for each in found if each is not None]


def choices_of(study: Study, quantiles: Sequence[float] | None = None) -> list[Choice]:
    """The settings to judge, by budget and criterion; of another task's, those that it chose.

    quantiles: of the budgets; None takes the task's own.
    """
    if study.settings_of is not None:
        return _taken_over(study)
    found, settings = tuned(study), len(study.entries())
    if len(found) < settings:
        print(
            f"{study.name}: {settings - len(found)} of {settings} settings have no result"
        )
    rule = study.described["choose"]
    tunable = [each for each in found if each.entry.role != "reference"]
    return choose(tunable, quantiles or rule["quantiles"], rule["by"])


def _taken_over(study: Study) -> list[Choice]:
    """Another task's choices under one of its budgets.

    With ``take: every method`` all of them; with ``take: best`` by criterion the best of ours and
    the best rival.
    """
    assert study.settings_of is not None
    other = load(
        study.settings_of, study.data, study.models, study.output.parent, study.quick
    )
    quantile = study.described["quantile"]
    under = [each for each in read_choices(other) if each.quantile == quantile]
    if study.described["take"] == "every method":
        return under
    found = (
        best_of(some, role)
        for some in grouped(under).values()
        for role in ("ours", "rival")
    )
    return [choice for choice in found if choice is not None]


def write_choices(study: Study, choices: Sequence[Choice]) -> Path:
    path = study.output / "choices.json"
    text = json.dumps(
        [asdict(choice) for choice in choices], indent=1, ensure_ascii=False
    )
    path.write_text(text, encoding="utf-8")
    return path


def read_choices(study: Study) -> list[Choice]:
    """
    Raises:
        MissingError: nothing has been chosen yet.
    """
    path = study.output / "choices.json"
    if not path.is_file():
        raise MissingError(
            f"{path} is not there: run the stages tune and choose first."
        )
    choices = []
    for found in json.loads(path.read_text(encoding="utf-8")):
        validation = found.pop("validation")
        entry = Entry(**validation.pop("entry"))
        choices.append(Choice(**found, validation=Measured(entry, **validation)))
    return choices


def to_judge(study: Study) -> list[Entry]:
    """The references, then every chosen setting once."""
    references = [entry for entry in study.entries() if entry.role == "reference"]
    chosen = (choice.validation.entry for choice in read_choices(study))
    return list({entry.name: entry for entry in (*references, *chosen)}.values())
