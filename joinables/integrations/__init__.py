"""Join inside training frameworks: one module for each, which imports it; this one imports no framework.

``joinables.integrations.accelerate``: a block for objects that Accelerate has prepared.
``joinables.integrations.transformers``: a ``Trainer`` of Transformers.
``joinables.integrations.lightning``: a strategy for Lightning's ``Trainer``.

``pip install 'joinables[NAME]'`` installs the framework of the same name.
"""

from __future__ import annotations

import importlib
import os
import re
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from typing_extensions import override

from join.errors import advise


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


VERSIONS = {"accelerate": ((1, 11), (2,)), "lightning": ((2, 5), (2, 7)), "transformers": ((4, 57), (6,))}
"""By the name of a framework, its oldest version that works, and the first that is refused; as in ``setup.cfg``."""


def refuse_options(refused: Mapping[str, str], options: Mapping[str, Any], place: str) -> None:
    """Raise an error for the first option that cannot hold on uneven ranks.

    Args:
        refused: By an option and its value, such as ``"name=True"``, why it cannot hold.
        options: The values that a user has chosen, by name.
        place: Where the user has written them.

    Raises:
        ValueError: If an option has such a value.
    """
    for option, effect in refused.items():
        name, _, value = option.partition("=")
        if str(options.get(name)) == value:
            #: The page of each framework lists the options that cannot hold if ranks have different numbers of batches.
            raise ValueError(f"With {option}, {effect}. Remove it from {place}. [J121]")


@contextmanager
def in_words_of(advice: Mapping[str, str]) -> Generator[None]:
    """Return a context whose errors say what the users of a framework write, who have no ``Join`` and no loop.

    Args:
        advice: By the codes of errors of this library, the advice that replaces theirs.
    """
    try:
        yield
    except BaseException as error:
        advise(error, advice)
        raise


def framework(name: str, package: str = "") -> Any:
    """Import a framework.

    Args:
        name: The name of its extra.
        package: The package to import; ``""`` for ``name``.

    Raises:
        ImportError: If it is not installed, or has a version that was not tried.
    """
    oldest, above = (".".join(map(str, bound)) for bound in VERSIONS[name])
    try:
        module: Any = importlib.import_module(package or name)
    except ImportError as error:
        raise ImportError(
            f"joinables.integrations.{name} needs the package {name}, which cannot be imported. Run pip install"
            f" 'joinables[{name}]'. [J126]"
        ) from error
    version = tuple(map(int, re.findall(r"\d+", module.__version__)[:2]))
    if not VERSIONS[name][0] <= version < VERSIONS[name][1]:
        raise ImportError(
            f"joinables.integrations.{name} does not support {name} {module.__version__}. Install a version that was"
            f" tried: pip install '{name}>={oldest},<{above}'. [J128]"
        )
    return module


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
