"""Without Ray: a sentence. This runs everywhere."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from tests.ending import Ending
from tests.scripts import as_script

TUTORIALS = Path(__file__).parents[3] / "tutorials"


def without_ray(rank: int) -> None:
    import_module("sklearn.datasets")  # joblib, which it imports, looks for Ray, too
    sys.modules["ray"] = None  # type: ignore[assignment]
    as_script(rank, str(TUTORIALS), "13_ray.py")


def test_a_missing_extra_is_a_sentence(ending: Ending) -> None:
    (end,) = ending.ends(without_ray, ranks=1, group=False)
    assert (end.code, end.stderr) == (1, "This tutorial needs Ray: pip install '.[ray]', in the clone\n")
