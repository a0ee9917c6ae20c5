"""Lightning's public and private names that this package uses; tried with 2.5 and 2.6.

Private names of Lightning: ``_DataFetcher``, ``_ResultCollection``, ``_fn``, ``_forward_cache``,
``_forward_redirection``, ``_mode``, ``_results``, ``_select_data_fetcher``, ``_setup_model``.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from joinables.integrations import framework

# pytorch_lightning, the older name, has the same code, but other classes.
is_older_name = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
package = "pytorch_lightning" if is_older_name else "lightning.pytorch"
version: str = framework("lightning", package.partition(".")[0]).__version__

if TYPE_CHECKING:

    class OfLightning(Any):
        """Base with all attributes, since Lightning is not installed where types are checked."""


try:
    Callback: type[OfLightning] = importlib.import_module(f"{package}.callbacks").Callback
    DataFetcher: type[OfLightning] = importlib.import_module(f"{package}.loops.fetchers")._DataFetcher
    DDPStrategy: type[OfLightning] = importlib.import_module(f"{package}.strategies").DDPStrategy
    StrategyRegistry: Any = importlib.import_module(f"{package}.strategies").StrategyRegistry
    ResultCollection: type[OfLightning] = importlib.import_module(
        f"{package}.trainer.connectors.logger_connector.result"
    )._ResultCollection
    rank_zero_warn: Any = importlib.import_module(f"{package}.utilities.rank_zero").rank_zero_warn
    LOOPS: list[Any] = [importlib.import_module(f"{package}.loops.{name}_loop") for name in ("fit", "evaluation")]
    select_data_fetcher, _ = (loop._select_data_fetcher for loop in LOOPS)
except (ImportError, AttributeError) as error:
    raise ImportError(
        f"joinables.integrations.lightning does not know this lightning {version} ({error}). Install an older version."
        " [J127]"
    ) from error
