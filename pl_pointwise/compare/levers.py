"""What a "no" advises: the commands that may help the nearest model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pl_pointwise.requirements.answer import Answer
from pl_pointwise.requirements.p_values import p_value, samples_needed_like
from pl_pointwise.requirements.requirement import Subject
from pl_pointwise.requirements.samples import CERTIFICATION, losses_of, values_of

from .runs import Comparison, Run


def advice(answer: Answer, comparison: Comparison, run: Run) -> list[str]:
    """What may help the requirement with the largest p-value; ``run`` is of the nearest model."""
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    nearest = answer.nearest()
    found = zip(answer.findings[nearest], answer.subjects, answer.selection.zero_one, strict=True)
    finding, subject, kind = max(found, key=lambda each: each[0].p)
    losses = losses_of(answer.models[nearest].samples, subject, CERTIFICATION)
    rate, files = finding.requirement.at_most, test_files(config)
    needed = samples_needed_like(losses, rate, answer.confidence, kind)
    levers = _levers(answer, subject, comparison, run, config)
    note = "is not less: more certification samples alone do not help."
    if needed is not None:
        note = f"takes {needed:,} of them for a yes four times in five."
        if files:
            levers.insert(0, ("More certification samples", comparison))
    new = "new ones" if files else "new ones, which no option of the data names"
    options = [f"--data.init_args.{name}=NEW_{name}.jsonl" for name in files]
    lines = [
        f"Seen: {finding.share:.3g} of {finding.n:,} samples, {rate:.3g} may be. That {note}",
        f"These certification samples are used: every command needs {new}.",
        "",
    ]
    for number, (what, changed) in enumerate(levers, start=1):
        again = Path(f"{comparison.output}-again")
        changed = replace(changed, output=again, overrides=[*changed.overrides, *options])
        lines.append(f"{number}. {what}: `{changed.command()}`")
    return [*lines, "", "This is read off the certification split: it is no certificate."]


def _levers(
    answer: Answer, subject: Subject, comparison: Comparison, run: Run, config: Mapping[str, Any]
) -> list[tuple[str, Comparison]]:
    """What may help but data, by whether the training data meet the constraint."""
    required, metrics = subject.requirement, (run.result() or {})["metrics"]
    trained, epochs = share_in_training(metrics, subject.quantity), epochs_of(config)
    if required.beyond is None or trained is None:
        return []
    seen, levers = f"{100 * trained:.3g} % of the training data violate", []
    path = "trainer.max_epochs"
    kept = [each for each in comparison.settings if not each.startswith(path)]
    if epochs is not None and trained > required.at_most:
        longer = replace(comparison, settings=[*kept, f"{path}={2 * epochs}"])
        levers.append((f"{seen} too. Longer training", longer))
    elif epochs is not None and epochs > 1:
        fewer = replace(comparison, settings=[*kept, f"{path}={epochs},{(epochs + 1) // 2}"])
        levers.append((f"Only {seen}: it is the gap to new inputs. Fewer epochs", fewer))
    beyond = _beyond(answer, subject)
    if beyond is not None and required.beside is None:
        text = f"{'/'.join(required.parts)}: q{100 * (1 - required.at_most):g} <= {beyond:g}"
        asked = [text if each == required.text else each for each in comparison.requirements]
        looser = replace(comparison, requirements=asked)
        levers.append(("A tolerance that this model would have met", looser))
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
    return [n for n, value in given.items() if n == "test_file" or ("test_file" in n and value)]
