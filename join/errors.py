"""Errors that a :class:`join.Join` block raises, with one class for each cause.

A rank that raises leaves its block at once, with its own exception. Every other rank raises :class:`PeerError`, which
names the first cause. It does so where it waits for the other ranks, or inside a collective if the process of the
failed rank has ended. A collective of the process group may then be incomplete: let the exceptions end the processes,
and restart from a checkpoint. The process group stays usable after :class:`EarlyTerminationError` only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class JoinError(RuntimeError):
    """Base class of the errors of this package: a ``Join`` block could not be carried out as written."""

    @property
    def code(self) -> str:
        """Code in the text, such as ``"J052"``; that of the quoted error in a :class:`PeerError`; ``""`` if none."""
        return Text.of(self).code

    @property
    def advice(self) -> str:
        """Reason and advice in the text, from its second sentence to its code; ``""`` without a code."""
        return Text.of(self).advice


class Text(NamedTuple):
    """Parts of the text of an error: ``"What happened. What to do. [J052] More"``, where a text that quotes has more.

    The first sentence says what happened. A value in it may contain a sentence of its own, in parentheses.
    """

    happened: str
    advice: str = ""
    code: str = ""
    rest: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Text:
        """Return the parts of the text of an error of this package, or of one that quotes it."""
        text, *found = re.split(r" \[(J\d{3})\]", str(error), maxsplit=1)
        if not found:
            return cls(text)
        happened, *advice = re.split(r"(?<=[.?])\s(?=[A-Z])", text)
        while advice and happened.count("(") > happened.count(")"):
            happened += f" {advice.pop(0)}"
        return cls(happened, " ".join(advice), *found)


def advise(error: BaseException, advice: Mapping[str, str]) -> None:
    """Replace the advice in the text of an error, for those who use this package inside another one.

    Args:
        error: An error of this package, or one that quotes it.
        advice: By the code of an error, the advice for it.
    """
    text = Text.of(error)
    if text.code in advice:
        error.args = (f"{text.happened} {advice[text.code]} [{text.code}]{text.rest}",)


def described(error: BaseException) -> str:
    """Return the class of an exception, followed by its text if it has one."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def add_note(error: BaseException, note: str) -> None:
    """Add a line to the traceback of an exception. Python 3.10 has no notes and ignores it."""
    add = getattr(error, "add_note", None)
    if add is not None:
        add(note)


class EarlyTerminationError(JoinError):
    """Exception for ``throw_on_early_termination=True`` when a rank runs out of batches.

    Every rank raises it at the same step. The process group stays usable.
    """


class PeerError(JoinError):
    """Exception for the failure of another rank.

    The message has the failed rank, and the class and text of its exception.

    Attributes:
        rank: The rank that failed first; ``None`` if it is not known.
    """

    rank: int | None = None


class ProtocolError(JoinError):
    """Exception for ranks whose actions do not match.

    They announced different bursts, or one skipped a burst of the others.
    """


class JoinTimeoutError(JoinError):
    """Exception for a rank that did not arrive within ``timeout`` seconds.

    Its message has the place of each rank, with the line of the user's code.
    """


def wrong_kind(name: str, value: object, kind: str, fix: str) -> TypeError:
    """Return the error for an argument that is not of a ``kind``."""
    return TypeError(f"{name}={value!r} is not {kind}. Pass {fix}. [J001]")


def wrong_value(name: str, value: object, kind: str, fix: str) -> ValueError:
    """Return the error for an argument that has a value which is not allowed."""
    return ValueError(f"{name}={value!r} is not {kind}. Pass {fix}. [J002]")


def outside(what: str, place: str, fix: str) -> JoinError:
    """Return the error for a call outside the block or loop that it belongs to."""
    return JoinError(f"{what} outside {place}. {fix}. [J055]")
