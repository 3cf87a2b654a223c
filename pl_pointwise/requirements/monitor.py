"""``pl-pointwise monitor``: whether a certificate still holds, by a file of new records.

    pl-pointwise monitor results/required/model --data.init_args.test_file week-12.jsonl

Of every requirement of the folder, which ``compare --require`` exported, all new records so far say

    broken       they violate more than is required, beyond chance
    believable   nothing speaks against it yet
    not watched  it is about a predecessor: pl-pointwise check

at 1 − confidence for all requirements and all calls together that ``certificate/monitor.json``, or
``--state``, has on record: a call goes on where the last one ended, and what is broken stays so.
Beside it stands what the records of this call show alone, and what they could have shown. Ends with
status 1 where one is broken. Of the folder's configuration only classes of this package are built;
--config names one that you trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock
from lightning.pytorch.utilities import rank_zero_only
from pandas import DataFrame

from pl_pointwise.command_line.cli_errors import CommandParser

from .exported import CERTIFICATE, measure_new_records, read_certificate
from .monitor_state import Calls, State, digest_of
from .p_values import MeanAbove, p_value_against
from .requirement import Requirement, RequirementError, distinct
from .samples import (
    lines_about,
    losses_by_unit,
    marks_of,
    records_not_known,
    require_known,
    with_content,
)
from .source import CONTENT

BROKEN, BELIEVABLE, NOT_WATCHED = "broken", "believable", "not watched"
STATE = "monitor.json"
WAIT = 60
"""Seconds for another process that judges by the same state."""
POWER = 0.8
"""Of what the records could have shown: four of five cases."""


@dataclass(frozen=True)
class Check:
    """One requirement on all new records so far.

    Attributes:
        n: independent samples among the records of this call, without the ``again`` known already.
        share: their mean loss, None without any.
        alone: p-value against the requirement of this call's records alone, in one look.
        seen: from which mean loss on this call's records would have ended in "broken", with what
            was on record before them, in four of five cases; None: from none.
        so_far, looks: independent samples of all calls on record, and calls that had any.
        broken: p-value against the requirement of all calls, however often it is looked at.
        delta: from which p-value down it is broken.
    """

    requirement: str  #: its text
    verdict: str  #: "broken", "believable" or "not watched"
    n: int = 0
    share: float | None = None
    alone: float = 1.0
    seen: float | None = None
    so_far: int = 0
    looks: int = 0
    broken: float = 1.0
    delta: float = 0.05
    again: int = 0

    def statement(self) -> str:
        """Returns the check in one line."""
        if self.verdict == NOT_WATCHED:
            return f"{self.requirement}: not watched: needs the predecessor, pl-pointwise check"
        verdict = self.verdict
        if verdict == BELIEVABLE:
            verdict = "nothing speaks against it yet"
            if self.alone <= self.delta:
                verdict = "not broken by all records so far, though these alone speak against it"
        sentences = [verdict, self._of_this_call()]
        if self.so_far:
            sentences.append(self._against_it())
        if self.share is not None and self.verdict == BELIEVABLE:
            sentences.append(self._could_have_shown())
        return f"{self.requirement}: {'. '.join(sentences)}."

    def _of_this_call(self) -> str:
        """What its records show, beside what is required; nothing of those before them."""
        new = f"{self.n:,} new samples" if self.n else "no new records"
        new += f", {self.again:,} left out as known already" if self.again else ""
        if self.share is None:
            return new
        required = Requirement.parse(self.requirement)
        return f"{new}: {required.in_words(self.share)}, where {required.allowed()}"

    def _against_it(self) -> str:
        calls = "1 call" if self.looks == 1 else f"{self.looks:,} calls"
        alone = "" if self.share is None else f"p = {self.alone:.2g} by these alone, "
        return (
            f"Against it {alone}p = {self.broken:.2g} by all {self.so_far:,} samples in {calls}, "
            f"broken at {self.delta:.2g} or less"
        )

    def _could_have_shown(self) -> str:
        if self.seen is None:
            return f"{self.n:,} new samples are too few to break it, whatever they show"
        least = Requirement.parse(self.requirement).from_on(self.seen)
        return f"These {self.n:,} new ones would have broken it in four of five cases {least}"


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options go to LightningCLI and say where the new records are."""
    parser = CommandParser("monitor", __doc__)
    parser.add_argument("folder", type=Path, help="what compare --require exported")
    parser.add_argument(
        "--state", type=Path, help=f"instead of FOLDER/{CERTIFICATE}/{STATE}"
    )
    parser.add_argument(
        "-c", "--config", action="append", default=[], help="one you trust"
    )
    known, options = parser.parse_known_args(list(args))
    checks = monitor(known.folder, options, known.config, known.state)
    print("\n".join(check.statement() for check in checks), flush=True)
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
    read_certificate(folder, besides=_named(state))  # Before the forward pass.
    samples, _ = measure_new_records(folder, options, configs)
    return check(folder, samples, state)


def check(
    folder: str | Path, samples: DataFrame, state: Path | None = None
) -> list[Check]:
    """Returns the checks of a certificate, for values measured elsewhere.

    samples: the table of samples.py, of new records.
    state: the file of the calls so far, which is read and written.

    Raises:
        RequirementError: nothing that can be watched; a state that is damaged, of another
            certificate, or that cannot be written: then it says the checks too.
    """
    certificate, before = read_certificate(folder, besides=_named(state))
    requirements = distinct(
        certified["text"] for certified in certificate["requirements"]
    )
    # A certificate of an earlier version may name more.
    require_known(before, requirements)
    # Those against a predecessor need its values of the new records.
    watched = [requirement for requirement in requirements if not requirement.beside]
    if not watched:
        raise RequirementError(
            f"{folder} is certified only against a predecessor. With it: pl-pointwise check "
            f"{folder} --against OLD."
        )
    path = Path(state or Path(folder) / CERTIFICATE / STATE)
    # Written again on another day: the same.
    digest = digest_of({**certificate, "date": None})
    kept = State(path, digest, named=state is not None)
    zero_one = [
        requirement.text for requirement in watched if requirement.beyond is not None
    ]
    delta = (1 - certificate["confidence"]) / len(watched)  # Bonferroni.
    checks = list[Check]()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_name(f".{path.name}.lock"), timeout=WAIT):
            calls = kept.read(zero_one)
            for requirement in requirements:
                checks.append(_judge(requirement, before, samples, calls, delta))
            # The others have the same values.
            if not getattr(rank_zero_only, "rank", 0):
                kept.write(calls)
    except OSError as error:  # Also of a lock that another monitor holds.
        statements = "\n".join(check.statement() for check in checks)
        raise RequirementError(
            f"{path}: {error.strerror or error}. These records are not on record: make room or "
            f"name another --state, and give them again.\n{statements}"
        ) from None
    return checks


def _named(state: Path | None) -> list[Path]:
    return [] if state is None else [state]


def _judge(
    requirement: Requirement,
    before: DataFrame,
    new: DataFrame,
    calls: Calls,
    delta: float,
) -> Check:
    """Adds the new records' losses to the requirement's calls."""
    text = requirement.text
    if requirement.beside:
        return Check(text, NOT_WATCHED)
    past = calls.get(text, {"units": [], "losses": [], "contents": [], "looks": 0})
    lines = lines_about(new, requirement)
    known = {*marks_of(before), *past["units"], *past["contents"]}
    lines, again = records_not_known(lines, known)
    losses = losses_by_unit(lines, requirement)
    mean = MeanAbove(requirement.at_most)
    mean.add(past["losses"])
    share = None
    alone = 1.0
    seen = None
    if len(losses):
        zero_one = requirement.beyond is not None  # Not by a look at the losses.
        share = float(losses.mean())
        alone = p_value_against(losses, requirement.at_most, 1 - delta, zero_one)
        seen = mean.rate_seen(len(losses), delta, POWER)
        mean.add(losses)
        past = {
            # In the order of the losses: by unit.
            "units": [*past["units"], *sorted(lines["unit"].unique())],
            "losses": [*past["losses"], *losses.tolist()],
            "contents": sorted({*past["contents"], *with_content(lines)[CONTENT]}),
            "looks": past["looks"] + 1,
        }
        calls[text] = past
    return Check(
        requirement=text,
        verdict=BROKEN if mean.p_value <= delta else BELIEVABLE,
        n=len(losses),
        share=share,
        alone=alone,
        seen=seen,
        so_far=len(past["units"]),
        looks=past["looks"],
        broken=mean.p_value,
        delta=delta,
        again=again,
    )
