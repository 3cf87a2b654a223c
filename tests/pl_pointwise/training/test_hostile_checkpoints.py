"""A checkpoint from a stranger is data: it is used whole, or refused by name, and runs nothing.

Every file here goes through ``Trainer.fit(ckpt_path=…)`` and ``load_from_checkpoint`` as a user
calls them. The pickles in some of them create a file when they are run.
"""

from __future__ import annotations

import io
import os
import pickle
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pl_pointwise import Constraint, Penalty, Pointwise
from pl_pointwise.errors import TrainingError, refuse_damaged
from pl_pointwise.training.checkpoints import WholeCheckpointIO
from tests.pl_pointwise.toy import At, Toy, ToyData, ToyRows, fit, trainer

ROWS = ToyRows(7)
BATCH = 4


def module(**options: Any) -> Toy:
    return Toy(Pointwise(alpha=1.0, dual_lr=1.0), primal_steps=3, **options)


@pytest.fixture(name="good", scope="module")
def good_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saved in mid-epoch, with a window of one step open."""
    path = tmp_path_factory.mktemp("good") / "good.ckpt"
    save = At(1, lambda trainer: trainer.save_checkpoint(path))
    fit(module(), ROWS, batch_size=BATCH, callbacks=[save])
    return path


def resume(path: Path, into: Any = None) -> Any:
    into = into or module()
    trainer(max_epochs=2).fit(into, ToyData(ROWS, batch_size=BATCH), ckpt_path=path)
    return into


def changed(good: Path, path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The good checkpoint with ``change`` applied to it."""
    checkpoint = torch.load(good, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, path)
    return path


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, crater: Path) -> None:
        self.crater = crater

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.crater),)


def called_by(path: Path) -> set[str]:
    """What unpickling a torch archive would look up, by name; it is read, not run."""
    with zipfile.ZipFile(path) as archive:
        (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        found = pickletools.genops(archive.read(pickled))
        return {arg.split()[1] for code, arg, _ in found if code.name == "GLOBAL"}


@pytest.mark.parametrize("cut", [True, False], ids=["cut off", "text"])
def test_file_that_is_no_checkpoint_is_refused_by_name(
    cut: bool, good: Path, tmp_path: Path
) -> None:
    path = tmp_path / "cut.ckpt"
    path.write_bytes(good.read_bytes()[:-40] if cut else b"not a checkpoint")
    with pytest.raises(
        TrainingError, match=r"cut\.ckpt cannot be read.*Resume from another"
    ):
        resume(path)


def test_other_content_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.ckpt"
    torch.save({"weight": torch.zeros(2)}, path)
    with pytest.raises(
        TrainingError, match=r"other\.ckpt is no checkpoint of Lightning"
    ):
        resume(path)


def place(name: str) -> Callable[[dict[str, Any], Any], None]:
    def put(checkpoint: dict[str, Any], value: Any) -> None:
        target = checkpoint
        *folders, last = name.split("/")
        for folder in folders:
            target = target[folder]
        target[last] = value

    return put


PLACES = ["hyper_parameters/formulation", "pl_pointwise/multipliers/pair", "stranger"]


@pytest.mark.parametrize("where", PLACES)
def test_code_in_a_checkpoint_is_not_run(
    where: str, good: Path, tmp_path: Path
) -> None:
    crater = tmp_path / "crater"
    path = changed(
        good, tmp_path / "bomb.ckpt", lambda c: place(where)(c, Bomb(crater))
    )
    with pytest.raises(
        TrainingError, match=r"bomb\.ckpt cannot be read.*nothing was run"
    ):
        resume(path)
    with pytest.raises(pickle.UnpicklingError):
        Toy.load_from_checkpoint(path)
    with pytest.raises(TrainingError, match="nothing was run"):
        trainer().test(module(), ToyData(ROWS, ROWS), ckpt_path=path)
    assert not crater.exists()
    assert "mkdir" in called_by(path)  # Armed: it would have gone off.


def test_bare_pickle_is_not_run(tmp_path: Path) -> None:
    """Not a torch archive at all, as torch once wrote them."""
    crater, path = tmp_path / "crater", tmp_path / "bare.ckpt"
    path.write_bytes(pickle.dumps({"state_dict": Bomb(crater)}))
    with pytest.raises(TrainingError, match=r"bare\.ckpt cannot be read"):
        resume(path)
    assert not crater.exists()


def test_instantiator_named_in_a_checkpoint_is_not_imported(
    good: Path, tmp_path: Path
) -> None:
    """Lightning's key for building a module from hyperparameters: it once took any function."""
    crater = tmp_path / "crater"

    def change(checkpoint: dict[str, Any]) -> None:
        checkpoint["hyper_parameters"]["_instantiator"] = "os.mkdir"
        checkpoint["hyper_parameters"]["path"] = str(crater)

    path = changed(good, tmp_path / "instantiator.ckpt", change)
    with pytest.raises(Exception, match=r".+"):
        Toy.load_from_checkpoint(path)
    assert not crater.exists()


# What belongs to another module -------------------------------------------------------------------


def test_checkpoint_of_other_constraints_is_refused(good: Path) -> None:
    """The multipliers of "pair" would be dropped without a word."""
    without = Toy({"fit": Pointwise(), "pair": Penalty(weight=1.0)})
    for other in (Toy(Pointwise(), {"fit": Constraint(at_most=-0.3)}), without):
        with pytest.raises(TrainingError, match=r"pair, which has none in this module"):
            resume(good, other)


# What is damaged ----------------------------------------------------------------------------------

DAMAGE: dict[str, tuple[str, Any]] = {
    "another version": ("version", 0),
    "fewer samples": ("samples", 3),
    "NaN": ("multipliers/pair", torch.full((7, 3), float("nan"))),
    "window of text": ("window", ["abc"]),
    "random states": ("random_states", [{}]),
    "nothing": ("", {}),
}


@pytest.mark.parametrize(("where", "value"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_entry_is_refused(
    where: str, value: Any, good: Path, tmp_path: Path
) -> None:
    where = f"pl_pointwise/{where}".rstrip("/")
    path = changed(good, tmp_path / "damaged.ckpt", lambda c: place(where)(c, value))
    with pytest.raises(TrainingError):
        resume(path)


@pytest.mark.parametrize(
    "kind", [KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError]
)
def test_whatever_reading_a_state_raises_is_refused(kind: type[Exception]) -> None:
    with (
        pytest.raises(TrainingError, match="no state: what is wrong") as caught,
        refuse_damaged(lambda _: TrainingError("no state: what is wrong")),
    ):
        raise kind("deep inside")
    assert isinstance(caught.value.__cause__, kind)


def test_an_error_that_says_what_to_do_is_not_covered() -> None:
    with (
        pytest.raises(TrainingError, match="Resume from another one"),
        refuse_damaged(lambda _: TrainingError("damaged")),
    ):
        raise TrainingError("Resume from another one")


def bytes_of(content: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


def test_flipped_bit_is_refused_or_changes_nothing(good: Path, tmp_path: Path) -> None:
    """Anywhere: in names, numbers or the pickle. torch itself loads most of these."""
    content = good.read_bytes()
    expected = bytes_of(torch.load(good, weights_only=True))
    path = tmp_path / "flipped.ckpt"
    refused = 0
    for place in range(0, len(content), len(content) // 400):
        damaged = bytearray(content)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            found = WholeCheckpointIO().load_checkpoint(path)
        except TrainingError:
            refused += 1
        else:
            assert bytes_of(found) == expected
    assert refused > 100
