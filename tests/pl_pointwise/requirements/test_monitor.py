"""What a monitor says of calls on records, and which state it believes."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binom

from pl_pointwise.requirements import RequirementError
from pl_pointwise.requirements.monitor import Check, check
from pl_pointwise.requirements.monitor_state import digest_of

FAILS, MRR = "near: violated <= 0.1", "mrr@10 >= 0.3"


@pytest.fixture(name="model")
def certified_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "certificate").mkdir(parents=True)
    certify(folder, FAILS)
    records("certified", 100, 0.02).to_parquet(folder / "certificate/samples.parquet")
    return folder


def certify(folder: Path, *texts: str, **more: Any) -> None:
    entries = [{"text": text} for text in texts]
    certificate = {"confidence": 0.95, "requirements": entries, **more}
    (folder / "certificate/certificate.json").write_text(json.dumps(certificate))


def records(name: str, n: int, share: float, mean: float = 0.5) -> pd.DataFrame:
    """Of each as many as ``share`` says fail, and a metric of 0 and 1."""
    columns = {
        "dataset": "test",
        "category": "",
        "unit": [f"{name} {k}" for k in range(n)],
    }
    # Units come in no order of losses.
    places = np.random.default_rng(len(name)).permutation(n)
    near = np.where(places < round(share * n), 1.0, -1.0)
    metric = (places < round(mean * n)).astype(float)
    found = [
        pd.DataFrame(
            {**columns, "kind": "constraint", "quantity": "near", "value": near}
        ),
        pd.DataFrame(
            {**columns, "kind": "metric", "quantity": "mrr@10", "value": metric}
        ),
    ]
    return pd.concat([each.assign(index=range(n)) for each in found])


def said(model: Path, new: pd.DataFrame, state: Path | None = None) -> Check:
    [found] = check(model, new, state)
    return found


@pytest.mark.parametrize("past", [0.0, 0.05])
def test_a_break_after_a_good_past_is_seen_in_the_next_call(
    model: Path, past: float
) -> None:
    """A year of good records was a debt of seven hundred bad ones."""
    for week in range(10):
        assert said(model, records(f"week {week}", 1000, past)).verdict == "believable"
    assert said(model, records("then", 200, 0.4)).verdict == "broken"
    after = said(model, records("repaired", 200, 0.0))
    # It was not what was certified.
    assert (after.verdict, after.share) == ("broken", 0.0)
    assert after.alone == 1.0


def test_a_small_exceedance_is_seen(model: Path) -> None:
    """50,000 samples at 12 % where 10 % may were "as required, p = 1"."""
    found = [said(model, records(f"file {k}", 5000, 0.12)) for k in range(4)]
    assert found[-1].verdict == "broken"
    assert (found[-1].so_far, found[-1].looks) == (20_000, 4)


def test_each_call_says_what_its_records_show_and_could_have_shown(model: Path) -> None:
    found = said(model, records("a", 212, 0.0236))
    text = found.statement()
    assert text.startswith(
        f"{FAILS}: nothing speaks against it yet. 212 new samples: 2.36 % fail"
    )
    assert (
        "where 10 % may. Against it p = 1 by these alone, p = 1 by all 212 samples"
        in text
    )
    least = re.search(
        r"broken it in four of five cases from a rate of ([\d.]+) % on", text
    )
    assert least is not None
    assert found.seen is not None
    assert 10 < float(least[1]) < 25
    bad = said(model, records("b", 212, 0.25))
    assert bad.alone == pytest.approx(binom.sf(round(0.25 * 212) - 1, 212, 0.1))
    assert (
        f"25 % fail, where 10 % may. Against it p = {bad.alone:.2g} by these"
        in bad.statement()
    )
    few = said(model, records("c", 1, 0.0), model / "other.json").statement()
    assert "1 new samples are too few to break it, whatever they show" in few


def test_no_hypothesis_is_said_as_a_result(model: Path) -> None:
    for number, share in enumerate((0.0, 0.13, 0.4)):
        text = said(model, records(f"{number}", 100, share)).statement()
        assert "as required" not in text


def test_a_call_that_speaks_against_it_alone_is_not_called_silent(model: Path) -> None:
    for number in range(3):
        said(model, records(f"{number}", 5000, 0.08))
    found = said(model, records("worse", 100, 0.17))
    assert (found.verdict, found.alone <= 0.05) == ("believable", True)
    assert "these alone speak against it" in found.statement()
    assert "nothing speaks" not in found.statement()


def test_a_metric_is_said_in_its_own_terms(model: Path) -> None:
    certify(model, MRR)
    text = said(model, records("a", 200, 0.0, mean=0.45)).statement()
    assert "200 new samples: mean 0.45, where it has to be at least 0.3" in text
    assert re.search(
        r"cases from a mean of 0\.\d+ down, of values that are 0 or 1", text
    )
    broken = said(model, records("b", 200, 0.0, mean=0.1)).statement()
    assert broken.startswith(f"{MRR}: broken. 200 new samples: mean 0.1")


def test_a_requirement_that_stands_there_twice_is_one(model: Path) -> None:
    """It took half of the error, and "no new records" was said of the second."""
    certify(model, FAILS, "near:  violated<=.1")
    found = said(model, records("a", 60, 0.0))
    assert (found.n, found.delta) == (60, pytest.approx(0.05))


# Which state is believed -------------------------------------------------------------------------


def state_of(certificate: Path, calls: Any) -> str:
    """A state with all its digests right, as anybody can make it."""
    found = json.loads((certificate / "certificate.json").read_text())
    digest = digest_of({**found, "date": None})
    return json.dumps(
        {"certificate": digest, "digest": digest_of(calls), "calls": calls}
    )


def call(
    units: Any = ("a", "b"), losses: Any = (0, 1), looks: Any = 1
) -> dict[str, Any]:
    return {FAILS: {"units": units, "losses": losses, "contents": [], "looks": looks}}


IMPOSSIBLE = {
    "no mapping": [],
    "a list of calls": {FAILS: []},
    "a text": {FAILS: "units"},
    "null": {FAILS: None},
    "more losses": call(losses=(0, 1, 0)),
    "losses below 0": call(losses=(0, -1)),
    "losses between": call(losses=(0, 0.5)),
    "losses that are no numbers": call(losses=(0, "1")),
    "losses that are not a number": call(losses=(0, float("nan"))),
    "endless": call(losses=(0, float("inf"))),
    "truth": call(losses=(0, True)),
    "a unit twice": call(units=("a", "a")),
    "units that are no texts": call(units=("a", ["b"])),
    "no looks": call(looks=0),
    "more looks than samples": call(looks=3),
    "looks that are no number": call(looks="1"),
    "more than there is": {FAILS: {**call()[FAILS], "log_wealth": [0.0] * 24}},
    "less": {FAILS: {"units": ["a"]}},
}


@pytest.mark.parametrize("calls", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_state_that_no_records_can_have_left_is_refused(
    model: Path, calls: Any
) -> None:
    """−10⁶ in 19 places made 500 of 500 violations "nothing speaks against it yet"."""
    state = model / "state.json"
    state.write_text(state_of(model / "certificate", calls))
    with pytest.raises(RequirementError, match=r"state\.json is damaged"):
        said(model, records("new", 50, 1.0), state)


@pytest.mark.parametrize("wealth", [[-1e6] * 19, [0.0], ["a"], float("nan"), None])
def test_a_state_of_an_earlier_version_is_refused_with_what_to_do(
    model: Path, wealth: Any
) -> None:
    state = model / "state.json"
    calls = {FAILS: {"units": ["a"], "mean": {"log_wealth": wealth}, "looks": 1}}
    state.write_text(state_of(model / "certificate", calls))
    with pytest.raises(
        RequirementError, match="Move it away and give its records once more"
    ):
        said(model, records("new", 50, 1.0), state)


def test_a_state_that_came_with_the_folder_is_not_believed(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said(model, records("a", 100, 0.0))
    assert said(model, records("b", 100, 0.0)).so_far == 200  # One's own is.
    monkeypatch.setenv("PL_POINTWISE_USES", str(tmp_path / "of another user"))
    path = model / "certificate/monitor.json"
    with pytest.raises(
        RequirementError, match="not written by monitor for you"
    ) as error:
        said(model, records("c", 100, 1.0))
    assert f"--state {path}" in str(error.value)
    assert said(model, records("c", 100, 0.0), path).so_far == 300  # As the user says.
    path.unlink()
    assert said(model, records("c", 100, 0.0)).so_far == 100


def test_a_forged_past_hides_nothing(model: Path) -> None:
    """Even if a user names it: a good past is no debt."""
    losses = [0] * 20_000
    state = model / "state.json"
    calls = call([f"made up {k}" for k in range(len(losses))], losses)
    state.write_text(state_of(model / "certificate", calls))
    assert said(model, records("new", 60, 1.0), state).verdict == "broken"


def test_a_process_that_dies_between_note_and_state_loses_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said(model, records("a", 100, 0.0))

    def dies(path: Path, text: str) -> None:
        if path.name == "monitor.json":
            raise KeyboardInterrupt
        path.write_text(text)

    with monkeypatch.context() as patch:
        patch.setattr("pl_pointwise.requirements.monitor_state.write_whole", dies)
        with pytest.raises(KeyboardInterrupt):
            said(model, records("b", 100, 0.0))
    assert said(model, records("b", 100, 0.0)).so_far == 200


def test_without_a_place_for_notes_it_is_said_what_the_next_call_needs(
    model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PL_POINTWISE_USES", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        said(model, records("a", 100, 0.0))
    assert f"--state {model / 'certificate/monitor.json'}" in caplog.text
