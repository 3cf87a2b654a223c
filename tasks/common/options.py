"""Options checked before anything is loaded: what is wrong, and what may be given."""

from __future__ import annotations

from collections.abc import Sequence


def one_of(
    option: str,
    value: str | None,
    allowed: Sequence[str | None],
    error: type[ValueError] = ValueError,
) -> None:
    """Refuses a value that is not among those allowed."""
    if value not in allowed:
        names = ", ".join("null" if each is None else each for each in allowed)
        raise error(f"{option}={value!r}: choose one of {names}.")
