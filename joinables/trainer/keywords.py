"""Errors for misspelt keyword arguments: :func:`checks_keywords`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from join.arguments import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


def checks_keywords(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method so that an unknown keyword is a ``TypeError`` that names the likely one, as in Python 3.13."""
    names = [name for name in inspect.signature(method).parameters if name != "self"]
    kind, own = method.__qualname__.split(".")[-2:]

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        for name, value in kwargs.items():
            if name not in names:
                taker = kind if own == "__init__" else own
                given = f"{name}={value!r}" if isinstance(value, (str, int, float)) else name
                missing = [each for each in names[len(args) - 1 :] if each not in kwargs]  # the first of args is self
                raise TypeError(f"{given}: {taker} takes {', '.join(names)}{did_you_mean(name, missing)} [J212]")
        return method(*args, **kwargs)

    return checked
