"""A comparison's command with something set otherwise, for what a "no" advises."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .runs import Comparison


@dataclass(frozen=True)
class Again:
    """What a run's task calls its epochs, tolerances and files, and the command with others.

    Attributes:
        comparison: of the run.
        config: of the run, all defaults included.
        bounds: what its violations are judged by, as text, by constraint.
    """

    comparison: Comparison
    config: Mapping[str, Any]
    bounds: Mapping[str, str]

    def command(
        self, settings: Mapping[str, str] | None = None, require: Mapping[str, str] | None = None
    ) -> str:
        """Returns the command, on new certification samples where they are files.

        settings: values by path, in place of those that it sweeps. require: new by old.
        """
        before, taken, old = self.comparison, _last(settings or {}), require or {}
        kept = [each for each in before.settings if not _last([each.partition("=")[0]]) & taken]
        files = [f"--data.init_args.{name}=NEW_{name}.jsonl" for name in self.test_files()]
        return replace(
            before,
            output=Path(f"{before.output}-again"),
            settings=[*kept, *(f"{path}={values}" for path, values in (settings or {}).items())],
            overrides=[*before.overrides, *files],
            requirements=[old.get(each, each) for each in before.requirements],
        ).command()

    def test_files(self) -> list[str]:
        """Returns the options that take new certification samples: of what the run had files of."""
        given = (self.config.get("data") or {}).get("init_args") or {}
        if given.get("source", "files") != "files":
            return []
        names = {name: name.removesuffix("test_file") for name in given if "test_file" in name}
        return [n for n, kind in names.items() if not kind or given[n] or given.get(f"{kind}file")]

    def epochs(self) -> int | None:
        """Returns the run's epochs; None where something else ends it, or it was not trained."""
        trainer = self.config["trainer"]
        epochs, steps = trainer.get("max_epochs") or -1, trainer.get("max_steps", -1)
        return epochs if epochs > 0 > steps else None

    def stricter(self, constraint: str, by: float) -> dict[str, str]:
        """Returns settings of two stricter training tolerances, judged by the same bound.

        {} where the task has no such option, or the bound would move with it.
        """
        given = self.config["model"].get("init_args") or {}
        names = [n for n in (f"{constraint}_tolerance", "tolerance") if n in given]
        found = re.findall(r"(at_least|at_most|equals)=([-+.\de]+)", self.bounds[constraint])
        if by <= 0 or not names or len(found) != 1 or found[0][0] == "equals":
            return {}
        (side, judged), own, path = found[0], given[names[0]], "model.init_args."
        pinned = {}
        if "evaluation_tolerance" in given:
            pinned = {f"{path}evaluation_tolerance": judged}
        elif "evaluation" in given:
            pinned = {f"{path}evaluation.{names[0]}": judged}
        elif own == float(judged):
            return {}
        up = by if side == "at_least" else -by
        # Neither 0 nor 1 is passed: a log-likelihood or a probability cannot be asked to.
        values = [v for v in (own + up, own + 2 * up) if (v > 0, v < 1) == (own > 0, own < 1)]
        return {path + names[0]: ",".join(f"{v:.4g}" for v in values), **pinned} if values else {}


def _last(paths: Mapping[str, str] | list[str]) -> set[str]:
    return {path.rpartition(".")[2] for path in paths}
