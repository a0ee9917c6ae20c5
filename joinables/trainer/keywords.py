"""Keywords that are no arguments, most likely typos: :func:`checks_keywords`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec

from join.arguments import did_you_mean

P = ParamSpec("P")


def checks_keywords(init: Callable[P, None]) -> Callable[P, None]:
    """Let a constructor say which argument was meant, which Python does from 3.13 on."""
    names = [name for name in inspect.signature(init).parameters if name != "self"]
    kind = init.__qualname__.split(".")[-2]

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        for name, value in kwargs.items():
            if name not in names:
                raise TypeError(f"{name}={value!r}: {kind} takes {', '.join(names)}{did_you_mean(name, names)}")
        init(*args, **kwargs)

    return checked
