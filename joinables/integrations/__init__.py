"""Join inside training frameworks: one module for each, which imports it; this one imports no framework.

``joinables.integrations.accelerate``: a block for objects that Accelerate has prepared.
``joinables.integrations.transformers``: a ``Trainer`` of Transformers.
``joinables.integrations.lightning``: a strategy for Lightning's ``Trainer``.

``pip install 'joinables[NAME]'`` installs the framework of the same name.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override


def warn_if_alone(caller: str, processes: int, fix: str) -> None:
    """Warn if a launcher started several processes, and the framework trains in each of them as if it were alone.

    Args:
        caller: The name of the function or class that the user called.
        processes: The number of processes that the framework trains in.
        fix: What to do, as a sentence.
    """
    launched = os.environ.get("WORLD_SIZE", "1")
    if processes == 1 and launched != "1" and "RANK" in os.environ:
        text = f"{caller} trains in num_processes=1, but WORLD_SIZE={launched}: each process trains a model of its own."
        warnings.warn(f"{text} {fix}", stacklevel=3)


@contextmanager
def in_words_of(fixes: Mapping[str, tuple[str, str]]) -> Generator[None]:
    """Return a context whose errors say what the users of a framework write, who have no ``Join`` and no loop.

    Args:
        fixes: By the code of an error of this library, the first words of its advice, and the advice that replaces
            it. Without a code, all words of the advice.
    """
    try:
        yield
    except BaseException as error:
        reword(error, fixes)
        raise


def reword(error: BaseException, fixes: Mapping[str, tuple[str, str]]) -> None:
    """Replace the advice in the text of an error, which may quote the text of another rank; see ``in_words_of``."""
    for code, (begin, fix) in fixes.items():
        pattern = re.compile(re.escape(begin) + (rf".*?(?= \[{code}\])" if code else ""), re.DOTALL)
        error.args = tuple(pattern.sub(fix, each) if isinstance(each, str) else each for each in error.args)


class Loader:
    """Loader with the length of the longest loader of all ranks, or without a length if a rank's loader has none.

    Args:
        loader: This rank's loader.
        length: The length of the longest loader; ``None`` if it is unknown.
    """

    def __init__(self, loader: Any, length: int | None) -> None:
        self.loader, self.length = loader, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)

    def __len__(self) -> int:
        if self.length is None:
            kind = type(self.loader).__name__
            raise TypeError(f"The {kind} of at least one rank has no length. Define __len__ on all ranks. [J124]")
        return self.length

    def __getattr__(self, name: str) -> Any:  # sampler, dataset, ...
        if name == "loader" or name.startswith("__"):  # this is called before __init__ when a loader is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:  # worker_init_fn, ...
        object.__setattr__(self if name in ("loader", "length", "used") else self.loader, name, value)
