"""What a "no" advises: the commands that may help the nearest model, the nearest lever first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pl_pointwise.requirements.answer import Answer
from pl_pointwise.requirements.p_values import p_value, samples_needed
from pl_pointwise.requirements.requirement import Subject
from pl_pointwise.requirements.samples import CERTIFICATION, values_of

from .runs import Comparison, Run

WORTHWHILE = 4
"""More data is the nearest lever if it takes at most this many times what there is."""


def advice(answer: Answer, comparison: Comparison, run: Run) -> list[str]:
    """Returns lines on what may help, for the requirement with the largest p-value.

    More certification samples come first if the share is below the rate and they are at most
    :data:`WORTHWHILE` times those there are.

    run: of the nearest model.
    """
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    found = zip(answer.findings[answer.nearest()], answer.subjects, strict=True)
    finding, subject = max(found, key=lambda pair: pair[0].p)
    rate, files = finding.requirement.at_most, test_files(config)
    needed = samples_needed(rate, finding.share, answer.confidence)
    levers = _levers(answer, subject, run, config)
    note = "is not less: more certification samples alone do not help."
    if needed is not None:
        note = f"takes {needed:,} of them for a yes four times in five."
        if files:
            place = 0 if needed <= WORTHWHILE * finding.n else len(levers)
            levers.insert(place, ("More certification samples", {}, {}))
    new = "new ones" if files else "new ones, which no option of the data names"
    return [
        f"Seen: {finding.share:.3g} of {finding.n:,} samples, {rate:.3g} may be. That {note}",
        f"These certification samples are used: every command needs {new}.",
        "",
        *(
            f"{n}. {what}: `{command(comparison, files, settings, require)}`"
            for n, (what, settings, require) in enumerate(levers, start=1)
        ),
        "",
        "This is read off the certification split: it is no certificate.",
    ]


Lever = tuple[str, Mapping[str, str], Mapping[str, str]]
"""What it does, the settings by path, requirements by the one that they replace."""


def _levers(answer: Answer, subject: Subject, run: Run, config: Mapping[str, Any]) -> list[Lever]:
    """What may help but data: by whether the training data meet the constraint."""
    required, result, name = subject.requirement, run.result() or {}, subject.quantity
    trained, epochs = share_in_training(result["metrics"], name), epochs_of(config)
    if required.beyond is None or trained is None:
        return []
    seen, levers = f"{100 * trained:.3g} % of the training data violate", list[Lever]()
    beyond = _beyond(answer, subject)
    if trained > required.at_most:
        if epochs is not None:
            longer = {"trainer.max_epochs": str(2 * epochs)}
            levers.append((f"{seen} too. Longer training", longer, {}))
    else:
        gap = f"Only {seen}: it is the gap to new inputs."
        by = (beyond or 0) - required.beyond
        if settings := stricter(config, name, result["bounds"][name], by):
            levers.append((f"{gap} A stricter bound in training", settings, {}))
        if epochs is not None and epochs > 1:
            fewer = {"trainer.max_epochs": f"{epochs},{(epochs + 1) // 2}"}
            levers.append((f"{gap} Fewer epochs", fewer, {}))
    if beyond is not None and required.beside is None:
        text = f"{'/'.join(required.parts)}: q{100 * (1 - required.at_most):g} <= {beyond:g}"
        met = "A tolerance that this model would have met"
        levers.append((met, {}, {required.text: text}))
    return levers


def _beyond(answer: Answer, subject: Subject) -> float | None:
    """By which worst violation the nearest model would have met the rate; None: no finite one."""
    values = values_of(answer.models[answer.nearest()].samples, subject, CERTIFICATION)
    by_unit = np.sort(values.fillna({"value": np.inf}).groupby("unit")["value"].max())
    for beyond in by_unit[np.isfinite(by_unit)]:
        losses, rate = (by_unit > beyond).astype(float), subject.requirement.at_most
        if p_value(losses, rate, answer.confidence) <= 1 - answer.confidence:
            return math.ceil(1000 * beyond) / 1000
    return None


def share_in_training(metrics: Mapping[str, float], constraint: str) -> float | None:
    """Returns the share of the training samples that violate."""
    start = f"train/{constraint}/violated"
    return metrics.get(f"{start}_samples", metrics.get(start))


def epochs_of(config: Mapping[str, Any]) -> int | None:
    """Returns a run's epochs; None where something else ends it, or it was not trained."""
    epochs = config["trainer"].get("max_epochs") or -1
    return epochs if epochs > 0 > config["trainer"].get("max_steps", -1) else None


def test_files(config: Mapping[str, Any]) -> list[str]:
    """Returns the options that take new certification samples: of what the run had files of."""
    given = (config.get("data") or {}).get("init_args") or {}
    if given.get("source", "files") != "files":
        return []
    names = {name: name.removesuffix("test_file") for name in given if "test_file" in name}
    return [n for n, kind in names.items() if not kind or given[n] or given.get(f"{kind}file")]


def stricter(
    config: Mapping[str, Any], constraint: str, bounds: Mapping[str, float], by: float
) -> dict[str, str]:
    """Returns settings of two stricter training tolerances, judged by the same bound.

    bounds: what the constraint is judged by, as ``{"at_most": 0.5}``.
    Returns: {} where the task has no such option, or the bound would move with it.
    """
    given, path = config["model"].get("init_args") or {}, "model.init_args."
    name = next((n for n in (f"{constraint}_tolerance", "tolerance") if n in given), None)
    if by <= 0 or name is None or len(bounds) != 1 or "equals" in bounds:
        return {}
    [(side, judged)], own, pinned = bounds.items(), given[name], dict[str, str]()
    if "evaluation_tolerance" in given:
        pinned = {f"{path}evaluation_tolerance": str(judged)}
    elif "evaluation" in given:
        pinned = {f"{path}evaluation.{name}": str(judged)}
    elif own == judged:
        return {}
    step = by if side == "at_least" else -by
    # Neither 0 nor 1 is passed: a log-likelihood or a probability cannot be asked to.
    values = [v for v in (own + step, own + 2 * step) if (v > 0, v < 1) == (own > 0, own < 1)]
    return {path + name: ",".join(f"{v:.4g}" for v in values), **pinned} if values else {}


def command(
    comparison: Comparison,
    files: Sequence[str],
    settings: Mapping[str, str],
    require: Mapping[str, str],
) -> str:
    """Returns a comparison's command with other settings and requirements, on new samples.

    settings: values by path, in place of those that it sweeps. require: new by old.
    """

    def option(setting: str) -> str:
        return setting.partition("=")[0].rpartition(".")[2]

    taken = {option(path) for path in settings}
    kept = [each for each in comparison.settings if option(each) not in taken]
    words = [f"--data.init_args.{name}=NEW_{name}.jsonl" for name in files]
    return replace(
        comparison,
        output=Path(f"{comparison.output}-again"),
        settings=[*kept, *(f"{path}={values}" for path, values in settings.items())],
        overrides=[*comparison.overrides, *words],
        requirements=[require.get(each, each) for each in comparison.requirements],
    ).command()
