"""What is used of Lightning, looked up when this is imported, and the one place where it is patched.

Lightning has no hook for who fetches the batches of its loops: ``_select_data_fetcher`` of the loops' modules is
replaced, once, by a function that asks the trainer's strategy and else does as before. Tried with 2.5 and 2.6.
"""

# ruff: noqa: D101  -- the classes for type checkers are described by Lightning

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

OLDEST = (2, 5)

_INSTALL = "install one of the versions that this was tried with: pip install 'lightning>=2.5,<2.7'"


def _looked_up() -> dict[str, Any]:
    try:
        version: str = importlib.import_module("lightning").__version__
    except ImportError as error:
        raise ImportError(
            "joinables.integrations.lightning needs the package lightning, which cannot be imported: pip install"
            " 'joinables[lightning]' [J126]"
        ) from error
    check_version(version)
    found: dict[str, Any] = {}
    for path, names in _NAMES.items():
        try:
            module = importlib.import_module(path)
            found |= {name: getattr(module, name) for name in names}
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"joinables.integrations.lightning does not support lightning {version} ({error}); {_INSTALL} [J127]"
            ) from error
    return found


def check_version(version: str) -> None:
    """Raise an ``ImportError`` for a version of Lightning that is too old."""
    numbers = re.findall(r"\d+", version)[:2]
    if tuple(map(int, numbers)) < OLDEST:
        raise ImportError(f"joinables.integrations.lightning does not support lightning {version}; {_INSTALL} [J128]")


_LOOPS = ("lightning.pytorch.loops.fit_loop", "lightning.pytorch.loops.evaluation_loop")

_NAMES = {
    "lightning.pytorch.callbacks": ["Callback"],
    "lightning.pytorch.loops.fetchers": ["_DataFetcher"],
    "lightning.pytorch.strategies": ["DDPStrategy", "StrategyRegistry"],
    "lightning.pytorch.trainer.connectors.logger_connector.result": ["_ResultCollection"],
    "lightning.pytorch.utilities.rank_zero": ["rank_zero_warn"],
    **{loop: ["_select_data_fetcher"] for loop in _LOOPS},
}

_found = _looked_up()

if TYPE_CHECKING:  # Lightning is not there where types are checked

    class Callback(Any): ...

    class DataFetcher(Any): ...

    class DDPStrategy(Any): ...

    class ResultCollection(Any): ...

else:
    Callback = _found["Callback"]
    DataFetcher = _found["_DataFetcher"]
    DDPStrategy = _found["DDPStrategy"]
    ResultCollection = _found["_ResultCollection"]

StrategyRegistry: Any = _found["StrategyRegistry"]
rank_zero_warn: Callable[[str], None] = _found["rank_zero_warn"]


def hand_over_fetching() -> None:
    """From now on, a strategy with a method ``fetcher`` gives the fetchers of its trainer's loops."""
    before: Any = _found["_select_data_fetcher"]

    def select(trainer: Any, stage: Any) -> Any:
        fetcher = getattr(trainer.strategy, "fetcher", None)
        return before(trainer, stage) if fetcher is None else fetcher(stage)

    for path in _LOOPS:
        loop: Any = importlib.import_module(path)
        loop._select_data_fetcher = select


# -- what has no public name ------------------------------------------------------------------------------------------


def replace_results(trainer: Any, make: Callable[[bool], Any]) -> None:
    """Replace what the trainer's loops collect logged values in.

    Args:
        trainer: the trainer.
        make: called with whether the loop trains; what it returns takes the place.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    epoch_loop._results = make(True)
    for loop in (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        loop._results = make(False)


def is_sequential(combined_loader: Any) -> bool:
    """Whether a ``CombinedLoader`` hands out one loader's batches after the other's."""
    return combined_loader._mode == "sequential"


def limits(combined_loader: Any) -> Iterable[float]:
    """How many batches of each loader there may be, at most."""
    return combined_loader.limits or [float("inf")] * len(combined_loader.flattened)
