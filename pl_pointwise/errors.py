"""The package's own errors: what happened, where, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class DataError(ValueError):
    """A record, batch or data set that cannot be used; names the place and the remedy."""


class TrainingError(RuntimeError):
    """A run that cannot go on, or a checkpoint that does not belong to it."""


class UnsupportedError(RuntimeError):
    """A way to compute something that this model does not allow; it ends a run that chose it."""


@dataclass(frozen=True)
class Words:
    """How the user of a door calls what he gives, for what errors say: a module's, if not others.

    A door is what a user trains by: a module, a loss in a loop, the mix-in for a Trainer.
    """

    objective: str = "objective()"
    values: str = "constraint_values()"
    masks: str = "membership()"
    strict: str = "strict_values()"
    index: str = 'batch["index"]'
    owner: str = "module"  #: of ``multipliers``


OF_METHODS = Words()


def printable(text: object, longest: int = 400) -> str:
    """Returns another's text for a terminal: on one line, printable, cut off where it is long."""
    characters = [c if c.isprintable() else " " for c in str(text)]
    line = " ".join("".join(characters).split())
    return line if len(line) <= longest else f"{line[:longest]} …"


def one_of(
    option: str,
    value: str | None,
    allowed: Sequence[str | None],
    error: type[ValueError] = ValueError,
) -> None:
    """Raises ``error`` for a value that is not among those allowed, before anything is loaded."""
    if value not in allowed:
        names = ", ".join("null" if choice is None else choice for choice in allowed)
        raise error(f"{option}={value!r}: choose one of {names}.")


DAMAGED = (LookupError, TypeError, ValueError, AttributeError, RuntimeError)
"""What reading a state raises of which an entry is missing, or of another type or shape."""


@contextmanager
def refuse_damaged(error_of: Callable[[Exception], TrainingError]) -> Iterator[None]:
    """Around the reading of a state, which may be damaged or of another version.

    error_of: what to raise of the error that it ends in; one that says what to do stays.
    """
    try:
        yield
    except TrainingError:
        raise
    except DAMAGED as error:
        raise error_of(error) from error


@contextmanager
def explain_gradient_errors() -> Iterator[None]:
    """Says what to do where the block, which runs without gradients, asks autograd for one."""
    try:
        yield
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        raise TrainingError(
            f"A gradient is asked for where none is taken ({error}). Put torch.enable_grad() "
            "around what takes gradients of inputs, in forward() or constraint_values()."
        ) from error
