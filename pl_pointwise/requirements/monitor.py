"""``pl-pointwise monitor``: whether a certificate still holds, by a file of new records.

    pl-pointwise monitor results/required/model --data.init_args.test_file week-12.jsonl

Of every requirement of the folder, which ``compare --require`` exported, all new records so far say

    broken      they violate more than is required, beyond chance
    in doubt    they are not drawn as the certification samples were: the values differ
    believable  neither

at 1 − confidence for all requirements and all calls together: a call goes on where the last one
ended, by ``certificate/monitor.json`` or ``--state``. Ends with status 1 unless all are believable.
Of the folder's configuration only classes of this package are built; --config names one that you
trust.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from pl_pointwise.cli_errors import CommandParser
from pl_pointwise.files import write_whole

from .anytime import Drift, MeanAbove
from .exported import CERTIFICATE, measure_new_records, read_certificate
from .requirement import Requirement, RequirementError, Subject
from .samples import CERTIFICATION, losses_of, values_of

BROKEN, IN_DOUBT, BELIEVABLE = "broken", "in doubt", "believable"
STATE = "monitor.json"


@dataclass(frozen=True)
class Check:
    """One requirement on all new records so far.

    Attributes:
        n: independent samples among the records of this call, without the ``again`` known already.
        share: their mean loss; ``certified_share`` when it was certified.
        so_far, looks: independent samples of all calls, and how many calls.
        broken: p-value of "the mean loss is at most what is required", over all calls.
        drift: of "the new values are drawn as the certification samples' were".
    """

    requirement: str
    n: int
    share: float
    so_far: int
    looks: int
    certified_share: float
    broken: float
    drift: float
    again: int
    verdict: str

    def statement(self) -> str:
        """Returns the check in one line."""
        left_out = f", {self.again:,} more left out as known already" if self.again else ""
        return (
            f"{self.requirement}: {self.verdict}. {self.n:,} new samples{left_out}: mean loss "
            f"{self.share:.3g}, {self.certified_share:.3g} when it was certified. {self.so_far:,} "
            f"samples in {self.looks} calls: required, p = {self.broken:.2g}; same distribution, "
            f"p = {self.drift:.2g}"
        )


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options go to LightningCLI and say where the new records are."""
    parser = CommandParser("monitor", __doc__)
    parser.add_argument("folder", type=Path, help="what compare --require exported")
    parser.add_argument("--output", type=Path, help="a JSON file for the checks")
    parser.add_argument("--state", type=Path, help=f"instead of FOLDER/{CERTIFICATE}/{STATE}")
    parser.add_argument("-c", "--config", action="append", default=[], help="one you trust")
    known, options = parser.parse_known_args(list(args))
    checks = monitor(known.folder, options, known.config, known.state)
    print("\n".join(check.statement() for check in checks))
    if known.output is not None:
        known.output.write_text(json.dumps([asdict(check) for check in checks], indent=1))
    if any(check.verdict != BELIEVABLE for check in checks):
        raise SystemExit(1)


def monitor(
    folder: str | Path,
    options: Sequence[str],
    configs: Sequence[str] = (),
    state: Path | None = None,
) -> list[Check]:
    """Returns the checks of an exported model on new records, a forward pass over which it makes.

    options, configs: see :func:`~.exported.measure_new_records`. state: of the calls so far.
    """
    read_certificate(folder)  # Before a forward pass.
    samples, _ = measure_new_records(folder, options, configs)
    return check(folder, samples, state)


def check(folder: str | Path, samples: DataFrame, state: Path | None = None) -> list[Check]:
    """Returns the checks of a certificate, for values measured elsewhere.

    samples: the table of samples.py, of new records; ``split`` is not read.
    state: as of :func:`monitor`; written when every requirement was tested.

    Raises:
        RequirementError: no new record that a requirement is about, or a state of another
            certificate.
    """
    certificate, before = read_certificate(folder)
    samples = samples.assign(split=CERTIFICATION)
    # Those against a predecessor need its values of the new records: pl-pointwise check.
    entries = [e for e in certificate["requirements"] if not Requirement.parse(e["text"]).beside]
    if not entries:
        raise RequirementError(
            f"{folder} is certified only against a predecessor. With it: pl-pointwise check "
            f"{folder} --against OLD."
        )
    path = state or Path(folder) / CERTIFICATE / STATE
    texts = {entry["text"]: [entry["n"], entry["share"]] for entry in entries}
    so_far = json.loads(path.read_text()) if path.is_file() else {"certificate": texts, "calls": {}}
    if so_far["certificate"] != texts:
        raise RequirementError(
            f"{path} holds the calls of another certificate. Move it away, or name another --state."
        )
    # Each is asked twice: whether it is broken, and whether the samples differ.
    delta = (1 - certificate["confidence"]) / (2 * len(entries))
    checks = [_judge(entry, before, samples, so_far["calls"], delta) for entry in entries]
    write_whole(path, json.dumps(so_far))
    return checks


def _judge(
    entry: dict[str, Any], before: DataFrame, new: DataFrame, calls: dict[str, Any], delta: float
) -> Check:
    requirement = Requirement.parse(entry["text"])
    subject = Subject(requirement, entry["dataset"], entry["quantity"], entry["category"])
    fresh: dict[str, Any] = {"units": [], "mean": None, "drift": None, "looks": 0}
    past = calls.setdefault(entry["text"], fresh)
    seen = new["unit"].isin({*before["unit"], *past["units"]})
    again = values_of(new[seen], subject, CERTIFICATION)["unit"].nunique()  # They tell nothing.
    losses = losses_of(new[~seen], subject, CERTIFICATION)
    now = _by_unit(new[~seen], subject)
    if not len(losses):
        raise RequirementError(
            f"{requirement.text!r}: none of the new records is about it"
            + (f", without {again:,} that are known already" if again else "")
            + f". Give new ones that {subject.quantity} applies to."
        )
    mean = MeanAbove(requirement.at_most, **(past["mean"] or {}))
    drift = Drift(**(past["drift"] or {"values": _by_unit(before, subject).tolist()}))
    mean.add(losses)
    drift.add(now)
    past["units"] += now.index.tolist()
    past["mean"], past["drift"] = {"log_wealth": mean.log_wealth}, asdict(drift)
    past["looks"] += 1
    broken, drifted = mean.p_value <= delta, drift.p_value <= delta
    return Check(
        requirement.text,
        n=len(losses),
        share=float(losses.mean()),
        so_far=len(past["units"]),
        looks=past["looks"],
        certified_share=entry["share"],
        broken=mean.p_value,
        drift=drift.p_value,
        again=again,
        verdict=BROKEN if broken else IN_DOUBT if drifted else BELIEVABLE,
    )


def _by_unit(samples: DataFrame, subject: Subject) -> Series:
    """One value a unit, in the order of hashes, which no value can set."""
    values = values_of(samples, subject, CERTIFICATION).fillna({"value": np.inf})
    return values.groupby("unit")["value"].max()
