"""What ``monitor`` keeps of its calls: the losses themselves, so that nothing in it is believed.

A state is JSON of one certificate: of each requirement, by its text, the units of all records so
far with their losses, from which the test is made anew in every call. Numbers that no records can
have are refused. Beside the certificate a state is read only if this user's own monitor wrote it,
by a note in the user's folder: one that comes with a download is a stranger's word.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pl_pointwise.files import write_whole

from .requirement import RequirementError
from .uses import users_folder

log = logging.getLogger(__name__)

Calls = dict[str, dict[str, Any]]
"""By a requirement's text: ``units``, as many ``losses``, the ``contents`` of the units' rows, and
``looks``, the calls with any."""
PARTS = {"units", "losses", "contents", "looks"}


def digest_of(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


class State:
    """The file of one certificate's calls.

    Args:
        path: of the file.
        certificate: a digest of the certificate.
        named: whether the user named the file, who then vouches for it.
    """

    def __init__(self, path: Path, certificate: str, named: bool) -> None:
        self.path = path
        self.certificate = certificate
        self.named = named

    def read(self, zero_one: Collection[str]) -> Calls:
        """Returns the calls so far; zero_one: the texts of requirements that count 0 or 1.

        Raises:
            RequirementError: a state that is damaged, of an earlier version, of another
                certificate, or that somebody else put beside the certificate.
        """
        if not self.path.is_file():
            return {}
        content = self._parse(zero_one)
        calls: Calls = content["calls"]
        if content.get("certificate") != self.certificate:
            raise RequirementError(
                f"{self.path} holds the calls of another certificate. Move it away, or name "
                "another --state."
            )
        # A state that lies beside a downloaded certificate may be made up to end in any verdict.
        if not self.named and digest_of(calls) not in self._noted():
            raise RequirementError(
                f"{self.path} was not written by monitor for you on this machine, so it is not "
                f"believed. If it is yours, go on with it by --state {self.path}; else move it "
                "away, and the calls begin anew."
            )
        return calls

    def write(self, calls: Calls) -> None:
        """Writes the calls whole or not at all; before that the note, for a process that dies."""
        digest = digest_of(calls)
        if not self.named:
            self._note(digest)
        content = {"certificate": self.certificate, "digest": digest, "calls": calls}
        write_whole(self.path, json.dumps(content))

    def _parse(self, zero_one: Collection[str]) -> dict[str, Any]:
        """The content of the file, none of which its calls contradict."""
        content: Any = {}
        calls = None
        whole = False
        try:
            content = json.loads(self.path.read_text("utf-8"))
            calls = content["calls"]
            whole = content["digest"] == digest_of(calls)
        except (ValueError, LookupError, TypeError, RecursionError):
            pass  # Damaged: not whole.
        if whole and _is_of_an_earlier_version(calls):
            raise RequirementError(
                f"{self.path} is of an earlier version, which kept no losses and was blind to "
                "small and to late failures. Move it away and give its records once more: they "
                "are judged anew."
            )
        if not whole or not _is_possible(calls, zero_one):
            raise RequirementError(
                f"{self.path} is damaged, or of an earlier version. Copy it again from where it is "
                "whole, or move it away: then the calls so far, and their share of the error, are "
                "forgotten."
            )
        return dict(content)

    @property
    def _notes(self) -> Path:
        return users_folder() / "monitor" / f"{self.certificate[:16]}.json"

    def _noted(self) -> list[str]:
        """Digests of the states that monitor wrote for this user, of this certificate."""
        try:
            notes = json.loads(self._notes.read_text("utf-8"))
        except (OSError, ValueError):
            return []
        if not isinstance(notes, list):
            return []
        return [digest for digest in notes if isinstance(digest, str)]

    def _note(self, digest: str) -> None:
        # The last one too: the process may die before the state is written.
        try:
            kept = [noted for noted in self._noted() if noted != digest]
            write_whole(self._notes, json.dumps([*kept[-20:], digest]))
        except OSError as error:
            log.warning(
                "The next call has to name this state, --state %s, as no note of it can be kept: "
                "%s",
                self.path,
                error,
            )


def _is_of_an_earlier_version(calls: Any) -> bool:
    """Of the versions that kept a gambler's wealth instead of losses."""
    entries = calls.values() if isinstance(calls, dict) else []
    return any(isinstance(entry, dict) and "mean" in entry for entry in entries)


def _is_possible(calls: Any, zero_one: Collection[str]) -> bool:
    """Whether records can have led to these calls."""
    if not isinstance(calls, dict):
        return False
    return all(
        _are_of_records(entry, text in zero_one) for text, entry in calls.items()
    )


def _are_of_records(entry: Any, zero_one: bool) -> bool:
    """Whether records can have led to what is kept of one requirement."""
    if not isinstance(entry, dict) or set(entry) != PARTS:
        return False
    units = entry["units"]
    losses = entry["losses"]
    if (
        not _are_texts(units)
        or not isinstance(losses, list)
        or len(units) != len(losses)
    ):
        return False
    looks = entry["looks"]
    # Each look had a new unit, and no unit comes twice.
    if (
        type(looks) is not int
        or not 1 <= looks <= len(units)
        or len({*units}) < len(units)
    ):
        return False
    if not _are_texts(entry["contents"]):
        return False
    # bool is no number here.
    if not all(type(loss) in (int, float) for loss in losses):
        return False
    return all(loss in (0, 1) if zero_one else 0 <= loss <= 1 for loss in losses)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)
