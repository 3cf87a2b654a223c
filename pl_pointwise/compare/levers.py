"""What a "no" advises: what speaks against the nearest model, and which samples come next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from pl_pointwise.requirements.answer import Answer
from pl_pointwise.requirements.p_values import samples_needed_like
from pl_pointwise.requirements.samples import CERTIFICATION, losses_of

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
    help_ = "More certification samples alone do not help."
    if needed is not None:
        help_ = f"If that holds for new inputs, {needed:,} samples show it four times in five."
    lines = [
        f"{finding.requirement.text}: a mean loss of {finding.share:.3g} was seen, and at most "
        f"{rate:.3g} is required. {help_}"
    ]
    seen = share_in_training((run.result() or {})["metrics"], subject.quantity)
    if finding.requirement.beyond is not None and seen is not None:
        gap = f"Only {100 * seen:.3g} % of the training data violate: fewer epochs, or a stricter"
        both = f"{100 * seen:.3g} % of the training data violate too: longer training, or another"
        lines.append(f"{both if seen > rate else gap} tolerance in training, may help.")
    options = [f"--data.init_args.{name}=NEW_{name}.jsonl" for name in files]
    again = replace(comparison, output=Path(f"{comparison.output}-again"))
    again = replace(again, overrides=[*again.overrides, *options])
    new = f"`{again.command()}`" if files else "which no option of the data names"
    lines.append(f"These certification samples are used. With new ones: {new}")
    return [*lines, "", "This is read off the certification split: it is no certificate."]


def share_in_training(metrics: Mapping[str, float], constraint: str) -> float | None:
    """Returns the share of the training samples that violate."""
    start = f"train/{constraint}/violated"
    return metrics.get(f"{start}_samples", metrics.get(start))


def test_files(config: Mapping[str, Any]) -> list[str]:
    """Returns the options that take new certification samples: of what the run had files of."""
    given = (config.get("data") or {}).get("init_args") or {}
    if given.get("source", "files") != "files":
        return []
    return [n for n, value in given.items() if n == "test_file" or ("test_file" in n and value)]
