"""A test of what this library and torch's both promise: :func:`either` runs it against each, :func:`run` on ranks.

What a test asserts is right. Where torch's class does otherwise, the test says why, and must fail with it.
"""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from join.collectives import collective_of
from tests.ending import Ending
from tests.harness import Pool, in_test_all

OURS, TORCHS = "join", "torch.distributed.algorithms.join"
"""Where ``Join``, ``Joinable`` and ``JoinHook`` are imported from."""


def libraries(wrong: str = "") -> list[Any]:
    """Both, as parameters of a test; ``wrong`` says what torch's does, if that is not right."""
    must_fail = pytest.mark.xfail(reason=wrong, strict=True, raises=AssertionError)
    # A change of this library cannot change what torch's does.
    marks = [in_test_all, must_fail] if wrong else [in_test_all]
    return [pytest.param(OURS, id="ours"), pytest.param(TORCHS, id="torch's", marks=marks)]


def either(wrong: str = "") -> pytest.MarkDecorator:
    """Run a test with each library's name; with torch's it must fail if ``wrong`` says why."""
    return pytest.mark.parametrize("library", libraries(wrong))


def run(ranks: Pool | Ending, library: str, fn: Callable[..., Any], *args: Any, hangs: bool = False) -> list[Any]:
    """Run ``fn(rank, library, *args)`` on three ranks; if torch's ``hangs`` there, that is known in seconds.

    Raises:
        AssertionError: with the tracebacks, if it raises on any rank.
    """
    results = ranks.run(_in_rank, library, fn, args, hangs and library == TORCHS, ranks=3)
    told = [text for text, _ in results]
    assert not any(told), "\n".join(told)
    return [result for _, result in results]


def _in_rank(rank: int, library: str, fn: Callable[..., Any], args: tuple[Any, ...], hangs: bool) -> tuple[str, Any]:
    if hangs:
        collective_of(None).limit(timedelta(seconds=2))
    try:
        with warnings.catch_warnings():  # torch's Join changes the filters
            return "", fn(rank, importlib.import_module(library), *args)
    except Exception:  # told here, the ranks need not be replaced
        return traceback.format_exc(), None
