"""Code and advice of an error, and other advice in their place."""

from __future__ import annotations

import pickle

import pytest

from join import JoinError, PeerError
from join.errors import advise

ADVICE = {"J011 J012": "Turn left.", "J345": "Turn right."}


@pytest.mark.parametrize(
    ("text", "code", "advice", "advised"),
    [
        ("No way. Turn back. [J012]", "J012", "Turn back.", "No way. Turn left. [J012]"),
        ("No way? Why. Turn back. [J012]", "J012", "Why. Turn back.", "No way? Turn left. [J012]"),
        ("No way (a. B). Turn back. [J012]", "J012", "Turn back.", "No way (a. B). Turn left. [J012]"),
        ("No way. [J012]", "J012", "", "No way. Turn left. [J012]"),
        ("No way. Turn back. [J999]", "J999", "Turn back.", "No way. Turn back. [J999]"),
        ("No way. Turn back", "", "", "No way. Turn back"),
        ("", "", "", ""),
        (
            "rank 1 failed: E: No way. Turn back. [J012]. Restart",
            "J012",
            "Turn back.",
            "rank 1 failed: E: No way. Turn left. [J012]. Restart",
        ),
        (
            "No way (E: No road. Go. [J345]). Turn back. [J012]",
            "J012",
            "Turn back.",
            "No way (E: No road. Turn right. [J345]). Turn left. [J012]",
        ),
    ],
)
def test_code_and_advice(text: str, code: str, advice: str, advised: str) -> None:
    for kind in (JoinError, PeerError):
        error = pickle.loads(pickle.dumps(kind(text)))
        assert (error.code, error.advice) == (code, advice)
        advise(error, ADVICE)
        assert str(error) == advised
        assert error.code == code


def test_errors_of_others() -> None:
    for error in (KeyError("x"), OSError(2, "gone"), KeyboardInterrupt(), ValueError("No way. Turn back. [J012]", 3)):
        before = error.args
        advise(error, ADVICE)
        assert error.args == before or "Turn left" in str(error)
