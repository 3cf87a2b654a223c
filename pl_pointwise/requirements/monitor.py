"""``pl-pointwise monitor``: whether a certificate still holds, by a file of new records.

    pl-pointwise monitor results/required/model --data.init_args.test_file week-12.jsonl

Of every requirement of the folder, which ``compare --require`` exported, all new records so far say

    broken       they violate more than is required, beyond chance
    believable   nothing speaks against it yet
    not watched  it is about a predecessor: pl-pointwise check

at 1 − confidence for all requirements and all calls together that ``certificate/monitor.json``, or
``--state``, has on record: a call goes on where the last one ended. Ends with status 1 where one is
broken. Of the folder's configuration only classes of this package are built; --config names one
that you trust.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only
from pandas import DataFrame

from pl_pointwise.command_line.cli_errors import CommandParser
from pl_pointwise.files import write_whole

from .exported import CERTIFICATE, measure_new_records, read_certificate
from .p_values import MeanAbove
from .requirement import Requirement, RequirementError
from .samples import lines_about, losses_by_unit, records_not_known, require_known

BROKEN, BELIEVABLE, NOT_WATCHED = "broken", "believable", "not watched"
STATE = "monitor.json"
WAIT = 60
"""Seconds for another process that judges by the same state."""


@dataclass(frozen=True)
class Check:
    """One requirement on all new records so far.

    Attributes:
        n: independent samples among the records of this call, without the ``again`` known already.
        share: their mean loss, None without any.
        so_far, looks: independent samples of all calls on record, and calls that had any.
        broken: p-value of "the mean loss is at most what is required", over all calls.
    """

    requirement: str  #: its text
    verdict: str  #: "broken", "believable" or "not watched"
    n: int = 0
    share: float | None = None
    so_far: int = 0
    looks: int = 0
    broken: float = 1.0
    again: int = 0

    def statement(self) -> str:
        """Returns the check in one line."""
        if self.verdict == NOT_WATCHED:
            return f"{self.requirement}: not watched: needs the predecessor, pl-pointwise check"
        said = "nothing speaks against it yet" if self.verdict == BELIEVABLE else self.verdict
        new = f"{self.n:,} new samples" if self.n else "no new records"
        new += f", {self.again:,} left out as known already" if self.again else ""
        new += "" if self.share is None else f": mean loss {self.share:.3g}"
        return (
            f"{self.requirement}: {said}. {new}. {self.so_far:,} samples in {self.looks} calls: "
            f"mean loss as required, p = {self.broken:.2g}"
        )


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options go to LightningCLI and say where the new records are."""
    parser = CommandParser("monitor", __doc__)
    parser.add_argument("folder", type=Path, help="what compare --require exported")
    parser.add_argument("--state", type=Path, help=f"instead of FOLDER/{CERTIFICATE}/{STATE}")
    parser.add_argument("-c", "--config", action="append", default=[], help="one you trust")
    known, options = parser.parse_known_args(list(args))
    checks = monitor(known.folder, options, known.config, known.state)
    print(*(each.statement() for each in checks), sep="\n", flush=True)
    if any(check.verdict == BROKEN for check in checks):
        raise SystemExit(1)


def monitor(
    folder: str | Path,
    options: Sequence[str],
    configs: Sequence[str] = (),
    state: Path | None = None,
) -> list[Check]:
    """Returns the checks of an exported model on new records, a forward pass over which it makes.

    options, configs: the data's, as on the command line. state: of :func:`check`.
    """
    read_certificate(folder)  # Before the forward pass.
    samples, _ = measure_new_records(folder, options, configs)
    return check(folder, samples, state)


def check(folder: str | Path, samples: DataFrame, state: Path | None = None) -> list[Check]:
    """Returns the checks of a certificate, for values measured elsewhere.

    samples: the table of samples.py, of new records.
    state: the file of the calls so far, which is read and written.

    Raises:
        RequirementError: nothing that can be watched; a state that is damaged, of another
            certificate, or that cannot be written: then it says the checks too.
    """
    certificate, before = read_certificate(folder)
    requirements = [Requirement.parse(each["text"]) for each in certificate["requirements"]]
    require_known(before, requirements)  # A certificate of an earlier version may name more.
    # Those against a predecessor need its values of the new records.
    watched = [each for each in requirements if not each.beside]
    if not watched:
        raise RequirementError(
            f"{folder} is certified only against a predecessor. With it: pl-pointwise check "
            f"{folder} --against OLD."
        )
    path = Path(state or Path(folder) / CERTIFICATE / STATE)
    digest = _digest({**certificate, "date": None})  # Written again on another day: the same.
    delta, checks = (1 - certificate["confidence"]) / len(watched), list[Check]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=WAIT):
            calls = _calls(path, digest)
            checks = [_judge(each, before, samples, calls, delta) for each in requirements]
            if not getattr(rank_zero_only, "rank", 0):  # The others have the same values.
                found = {"certificate": digest, "digest": _digest(calls), "calls": calls}
                write_whole(path, json.dumps(found))
    except OSError as error:  # Also of a lock that another monitor holds.
        said = "\n".join(each.statement() for each in checks)
        raise RequirementError(
            f"{path}: {error.strerror or error}. These records are not on record: make room or "
            f"name another --state, and give them again.\n{said}"
        ) from None
    return checks


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _calls(path: Path, certificate: str) -> dict[str, Any]:
    """Returns what a state holds of each requirement, by its text."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text("utf-8"))
        calls: dict[str, Any] = found["calls"]
        whole = found["digest"] == _digest(calls)
    except (ValueError, LookupError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise RequirementError(
            f"{path} is damaged, or of an earlier version. Copy it again from where it is whole, "
            "or move it away: then the calls so far, and their share of the error, are forgotten."
        )
    if found["certificate"] != certificate:
        raise RequirementError(
            f"{path} holds the calls of another certificate. Move it away, or name another --state."
        )
    return calls


def _judge(
    requirement: Requirement,
    before: DataFrame,
    new: DataFrame,
    calls: dict[str, Any],
    delta: float,
) -> Check:
    """Adds the new records' losses to the requirement's calls."""
    if requirement.beside:
        return Check(requirement.text, NOT_WATCHED)
    past = calls.get(requirement.text, {"units": [], "mean": {}, "looks": 0})
    lines = lines_about(new, requirement)
    lines, again = records_not_known(lines, {*before["unit"], *past["units"]})
    losses = losses_by_unit(lines, requirement)
    mean = MeanAbove(requirement.at_most, **past["mean"])
    if len(losses):
        mean.add(losses)
        calls[requirement.text] = past = {
            "units": [*past["units"], *lines["unit"].unique()],
            "mean": {"log_wealth": mean.log_wealth},
            "looks": past["looks"] + 1,
        }
    return Check(
        requirement.text,
        BROKEN if mean.p_value <= delta else BELIEVABLE,
        n=len(losses),
        share=float(losses.mean()) if len(losses) else None,
        so_far=len(past["units"]),
        looks=past["looks"],
        broken=mean.p_value,
        again=again,
    )
