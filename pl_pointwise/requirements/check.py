"""``pl-pointwise check``: whether a model may replace another, by the same inputs, beyond chance.

    pl-pointwise check NEW/model --against OLD/model --data.init_args.test_file records.jsonl \\
        --require "lost(refuse) <= 0.02" --require "refuse: violated <= 0.1"

Both folders are ones that ``compare --require`` exported; ``--against start`` is the model that NEW
was trained from. Both are measured on the records, which must have chosen neither. The answer is
yes if every requirement is met; where one is not, that happens with a probability of at most 1 −
confidence. Without --require: what NEW is certified for, and "lost(…) <= 0.05" for each of its
constraints. The answer is Markdown; exit status: 0 for yes, 1 for no. From the folders'
configurations only classes of this package are built; --config names one that you trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pandas import DataFrame

from pl_pointwise.certificates import ASSUMPTIONS
from pl_pointwise.command_line.cli_errors import CommandParser, fraction
from pl_pointwise.identity.files import digest_now

from .answer import Finding, repetitions
from .exported import (
    CERTIFICATE,
    CHECKPOINT,
    START,
    measure_new_records,
    read_certificate,
)
from .requirement import Requirement, RequirementError, distinct
from .samples import (
    beside,
    marks_of,
    quantities_in,
    records_not_known,
    require_known,
    require_same_bounds,
    units_in,
)
from .uses import remember_use, uses_of


def main(args: Sequence[str]) -> None:
    """Runs the command; unknown options go to LightningCLI and say where the records are."""
    parser = CommandParser("check", __doc__)
    parser.add_argument(
        "folder", type=Path, metavar="NEW", help="what compare --require exported"
    )
    parser.add_argument(
        "--against", required=True, metavar="OLD", help=f"another, or {START}"
    )
    parser.add_argument(
        "--require", action="append", default=[], help="a condition; several hold"
    )
    parser.add_argument("--confidence", type=fraction, default=0.95)
    parser.add_argument(
        "-c", "--config", action="append", default=[], help="one you trust"
    )
    known, options = parser.parse_known_args(list(args))
    findings = check_models(
        known.folder,
        known.against,
        options,
        require=known.require,
        confidence=known.confidence,
        configs=known.config,
    )
    print(report(findings))
    if not all(finding.met for finding in findings):
        raise SystemExit(1)


def check_models(
    folder: str | Path,
    against: str | Path,
    options: Sequence[str],
    require: Sequence[str] = (),
    confidence: float = 0.95,
    configs: Sequence[str] = (),
) -> list[Finding]:
    """A verdict per requirement; options, configs: as of :func:`~.exported.measure_new_records`."""
    certificate, samples = read_certificate(folder)
    new, bounds = measure_new_records(folder, options, configs)
    # The start is built from NEW's folder, without the weights that were trained.
    start = against == START
    old = folder if start else against
    _, samples_of_old = read_certificate(old)
    known = marks_of(samples) | marks_of(samples_of_old)
    new, left_out = records_not_known(new, known)
    if new.empty:
        raise RequirementError(
            f"All {left_out:,} records trained, selected or certified one of the models, so they "
            "show nothing. Give new ones."
        )
    before, bounds_of_old = measure_new_records(
        old, options, configs, trained=not start, own_arguments=start or not configs
    )
    require_same_bounds({str(folder): bounds, str(against): bounds_of_old})
    texts = list(require)
    if not texts:
        texts += [requirement["text"] for requirement in certificate["requirements"]]
        texts += [f"lost({name}) <= 0.05" for name in quantities_in(new, "constraint")]
    requirements = distinct(texts)
    findings = check(beside(new, before, requirements), requirements, confidence)
    weights = [
        digest_now(Path(model) / CERTIFICATE / CHECKPOINT) for model in (folder, old)
    ]
    use = {"requirements": sorted(texts), "confidence": confidence, "weights": weights}
    units = units_in(new)
    # The same question of the same weights, asked again, is no other use.
    others = sum(record["use"] != use for record in uses_of(units).values())
    remember_use(use, units, Path(folder))
    note = (
        f"{left_out:,} records that trained, selected or certified one of the models are left out; "
        f"{others:,} other checks or comparisons on record have used some of the rest."
    )
    return [replace(finding, note=note) for finding in findings]


def check(
    samples: DataFrame, requirements: Sequence[Requirement], confidence: float = 0.95
) -> list[Finding]:
    """Returns a verdict per requirement; the answer is yes if all are met.

    A yes is wrong only if a requirement that fails is found met, so each takes the whole error.

    samples: of :func:`~.samples.beside`.
    """
    verdicts = list[Finding]()
    require_known(samples, requirements)
    for requirement in requirements:
        zero_one = requirement.beyond is not None  # Not by a look at the losses.
        finding = Finding.of(samples, requirement, zero_one, confidence, confidence)
        if not finding.n:
            raise RequirementError(
                f"{requirement.text!r}: none of the records is about it."
            )
        verdicts.append(finding)
    return verdicts


def report(findings: Sequence[Finding]) -> str:
    """Returns the answer as Markdown."""
    confidence = findings[0].confidence
    sure = f"{100 * confidence:g} %"
    wrong = f"{100 * (1 - confidence):.3g} %"
    answer = f"**No**: not shown with {sure} confidence."
    if all(finding.met for finding in findings):
        answer = (
            f"**Yes**, with {sure} confidence: every requirement was shown to be met on inputs "
            f"like these, by a test that says so wrongly in at most {wrong} of cases."
        )
    lines = [answer, ""]
    lines += [_line(finding) for finding in findings]
    lines.append("")
    lines += repetitions(findings)
    alone = f"Each bound holds alone with {sure}. Assumptions: {ASSUMPTIONS} {findings[0].note}"
    lines.append(alone.strip())
    return "\n".join(lines)


def _line(finding: Finding) -> str:
    """A verdict, with the first samples that speak against it."""
    verdict = "met" if finding.met else "not shown"
    line = f"- {finding.requirement.text}: **{verdict}**. {finding.text()}."
    # Of a metric a sample with more than half of the largest loss.
    counts_against = finding.lines["loss"] > (0.0 if finding.zero_one else 0.5)
    positions = finding.lines[counts_against]["index"].sort_values()[:5].tolist()
    if positions:
        line += f" First samples against it: {', '.join(map(str, positions))}."
    return line
