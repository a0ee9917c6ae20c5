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
        """Code in the text, of the quoted error in a :class:`PeerError`, without brackets; ``""`` if there is none."""
        return Text.of(str(self)).code

    @property
    def advice(self) -> str:
        """Reason and advice in the text, from its second sentence to its code; ``""`` without a code."""
        return Text.of(str(self)).advice


class Text(NamedTuple):
    """Parts of the text of an error: what happened, the advice, and the code in brackets.

    A text that quotes another one has more after the code.

    The first sentence says what happened. A value in it may contain a sentence of its own, in parentheses.
    """

    happened: str
    advice: str = ""
    code: str = ""
    rest: str = ""

    @classmethod
    def of(cls, text: str) -> Text:
        """Return the parts of a text of this package, or of one that quotes it."""
        for found in re.finditer(r" \[(J\d{3})\]", text):
            before = text[: found.start()]
            if before.count("(") <= before.count(")"):  # otherwise it belongs to a text that is a value in this one
                happened, *advice = re.split(r"(?<=[.?])\s(?=[A-Z])", before)
                while advice and happened.count("(") > happened.count(")"):
                    happened += f" {advice.pop(0)}"
                return cls(happened, " ".join(advice), found[1], text[found.end() :])
        return cls(text)


def advised(text: str, advice: Mapping[str, str]) -> str:
    """Return the text of an error with other advice, for those who use this package inside another one.

    Args:
        text: The text of an error of this package, or one that quotes such texts.
        advice: By the codes of errors, such as ``"J012 J345"``, the advice for them.
    """
    parts = Text.of(text)
    if not parts.code:
        return text
    happened = re.sub(r"(?<=\().* \[J\d{3}\](?=\))", lambda quoted: advised(quoted[0], advice), parts.happened)
    words = next((words for codes, words in advice.items() if parts.code in codes), parts.advice)
    sentences = [happened, words, f"[{parts.code}]"]
    return " ".join(filter(None, sentences)) + parts.rest


def advise(error: BaseException, advice: Mapping[str, str]) -> None:
    """Replace the advice in the text of an error; see :func:`advised`."""
    if (text := advised(str(error), advice)) != str(error):
        error.args = (text,)


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
