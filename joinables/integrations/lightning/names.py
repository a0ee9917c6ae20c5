"""Lightning's public and private names that this package uses; tried with 2.5 and 2.6."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

OLDEST = (2, 5)

_INSTALL = "Install a version that it was tried with: pip install 'lightning>=2.5,<2.7'."


def check_version(version: str) -> None:
    """Raise an ``ImportError`` for a version of Lightning that is too old."""
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < OLDEST:
        raise ImportError(f"joinables.integrations.lightning does not support lightning {version}. {_INSTALL} [J128]")


try:
    version: str = importlib.import_module("lightning").__version__
except ImportError as error:
    raise ImportError(
        "joinables.integrations.lightning needs the package lightning, which cannot be imported. Run pip install"
        " 'joinables[lightning]'. [J126]"
    ) from error
check_version(version)

if TYPE_CHECKING:

    class OfLightning(Any):
        """Base with all attributes, since Lightning is not installed where types are checked."""


try:
    Callback: type[OfLightning] = importlib.import_module("lightning.pytorch.callbacks").Callback
    DataFetcher: type[OfLightning] = importlib.import_module("lightning.pytorch.loops.fetchers")._DataFetcher
    DDPStrategy: type[OfLightning] = importlib.import_module("lightning.pytorch.strategies").DDPStrategy
    StrategyRegistry: Any = importlib.import_module("lightning.pytorch.strategies").StrategyRegistry
    ResultCollection: type[OfLightning] = importlib.import_module(
        "lightning.pytorch.trainer.connectors.logger_connector.result"
    )._ResultCollection
    rank_zero_warn: Any = importlib.import_module("lightning.pytorch.utilities.rank_zero").rank_zero_warn
    LOOPS: list[Any] = [
        importlib.import_module(f"lightning.pytorch.loops.{name}_loop") for name in ("fit", "evaluation")
    ]
    select_data_fetcher, _ = (loop._select_data_fetcher for loop in LOOPS)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"joinables.integrations.lightning does not support lightning {version} ({error}). {_INSTALL} [J127]"
    ) from error
