"""``pl-pointwise monitor``: whether a certificate can still be believed, by a file of new records.

    pl-pointwise monitor results/required/model --data.init_args.test_file new.jsonl

The folder is one that ``compare --require`` exported; its ``certificate/`` holds the requirements,
the configuration, the trained module and what the certification samples measured. Of every
requirement the new records say

    broken      they violate more than is required, beyond chance
    in doubt    they are not drawn as the certification samples were: the values differ
    believable  neither

at 1 − confidence for all requirements together. Ends with status 1 unless all are believable.

The folder may be a stranger's: of its configuration only classes of this package are built. A task
of your own is named by --config: its fit's, or certificate/config.yaml once you have read it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame
from scipy import stats

from pl_pointwise.cli_errors import CommandParser

from .exported import measure_new_records, read_certificate
from .p_values import Losses, p_value, upper_bound
from .requirement import Requirement, RequirementError, Subject
from .samples import CERTIFICATION, losses_of, values_of

BROKEN, IN_DOUBT, BELIEVABLE = "broken", "in doubt", "believable"


@dataclass(frozen=True)
class Check:
    """One requirement on new records."""

    requirement: str
    n: int
    """Independent samples among the new records, without those of the certificate."""
    share: float
    """Their mean loss: the share that violates, or of the metric."""
    low: float
    """Bounds on the mean loss of inputs like these."""
    high: float
    certified_share: float
    drift: float
    """p-value of "the new values are drawn as the certification samples' were"."""
    again: int
    """Units left out because they were in the data of the certificate already."""
    verdict: str

    def statement(self) -> str:
        """Returns the check in one line."""
        left_out = f", {self.again:,} more left out as known already" if self.again else ""
        return (
            f"{self.requirement}: {self.verdict}. {self.n:,} new samples{left_out}: mean loss "
            f"{self.share:.3g} ({self.low:.3g} to {self.high:.3g}), {self.certified_share:.3g} "
            f"when it was certified; same distribution: p = {self.drift:.2g}"
        )


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options go to LightningCLI and say where the new records are."""
    parser = CommandParser("monitor", __doc__)
    parser.add_argument("folder", type=Path, help="what compare --require exported")
    parser.add_argument("--output", type=Path, help="a JSON file for the checks")
    parser.add_argument(
        "-c",
        "--config",
        action="append",
        default=[],
        help="in place of the folder's: one you trust",
    )
    known, options = parser.parse_known_args(list(args))
    try:
        checks = monitor(known.folder, options, known.config)
    except RequirementError as error:
        parser.error(str(error))
    print("\n".join(check.statement() for check in checks))
    if known.output is not None:
        known.output.write_text(json.dumps([asdict(check) for check in checks], indent=1))
    if any(check.verdict != BELIEVABLE for check in checks):
        raise SystemExit(1)


def monitor(folder: str | Path, options: Sequence[str], configs: Sequence[str] = ()) -> list[Check]:
    """Returns the checks of an exported model on new records, a forward pass over which it makes.

    folder, options, configs: see :func:`~.exported.measure_new_records`.

    Raises:
        RequirementError: what cannot be measured, or no new record that a requirement is about.
    """
    return check(folder, measure_new_records(folder, options, configs))


def check(folder: str | Path, samples: DataFrame) -> list[Check]:
    """Returns the checks of a certificate, for values measured elsewhere.

    folder: an exported one.
    samples: the table of samples.py, of new records; ``split`` is not read.

    Raises:
        RequirementError: no new record that a requirement is about.
    """
    certificate, before = read_certificate(folder)
    samples = samples.assign(split=CERTIFICATION)
    # Each is asked twice: whether it is broken, and whether the samples differ.
    delta = (1 - certificate["confidence"]) / (2 * len(certificate["requirements"]))
    return [_judge(entry, before, samples, delta) for entry in certificate["requirements"]]


def _judge(entry: dict[str, Any], before: DataFrame, new: DataFrame, delta: float) -> Check:
    requirement = Requirement.parse(entry["text"])
    subject = Subject(requirement, entry["dataset"], entry["quantity"], entry["category"])
    given = values_of(new, subject, CERTIFICATION)["unit"]
    known = given[given.isin(before["unit"])].nunique()  # They tell nothing.
    new = new[~new["unit"].isin(before["unit"])]
    losses = losses_of(new, subject, CERTIFICATION)
    if not len(losses):
        raise RequirementError(
            f"{requirement.text!r}: none of the new records is about it"
            + (f", but for {known:,} that the certificate was made with" if known else "")
            + f". Give new ones that carry {subject.quantity}."
        )
    kind, sure = bool(entry["zero_one"]), 1 - delta
    low, high = 1 - upper_bound(1 - losses, sure, kind), upper_bound(losses, sure, kind)
    then, now = (values_of(table, subject, CERTIFICATION) for table in (before, new))
    drift = _drift(then, now)
    if _broken(losses, requirement.at_most, delta, kind):
        verdict = BROKEN
    else:
        verdict = IN_DOUBT if drift <= delta else BELIEVABLE
    share = float(losses.mean())
    return Check(
        requirement.text, len(losses), share, low, high, entry["share"], drift, known, verdict
    )


def _broken(losses: Losses, at_most: float, delta: float, zero_one: bool) -> bool:
    """Whether the mean loss is above ``at_most`` beyond chance: of 1 − loss it is below.

    Of losses in between that were certified as 0 and 1, only those of 1 speak against it.
    """
    return p_value(1 - losses, 1 - at_most, 1 - delta, zero_one) <= delta


def _drift(before: DataFrame, new: DataFrame) -> float:
    """The p-value of Kolmogorov and Smirnov's two-sample test, of one value a unit."""
    values = [
        table.fillna({"value": np.inf}).groupby("unit")["value"].max().to_numpy()
        for table in (before, new)
    ]
    return float(stats.ks_2samp(*values).pvalue)
