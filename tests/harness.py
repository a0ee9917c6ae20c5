"""How tests run: which of them, and on which ranks. It does not import torch: pytest starts without.

``make test`` runs some tests and cases, ``make test-all`` (in CI) more, ``make test-night`` all. The environment
variable ``TESTS`` says so: unset, "all" or "night". Tests that :data:`in_test_all` or :data:`at_night` marks are
collected there only, unless they are named one by one (``pytest FILE::TEST``).

Each call of a :class:`Pool` has ranks of its own, which are forked from multiprocessing's forkserver by the runner of
``joinables.processes``. If a call does not end in time, the stacks of its ranks are shown.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest

# -- which tests run --------------------------------------------------------------------------------------------------

NIGHT = os.environ.get("TESTS") == "night"
ALL = NIGHT or os.environ.get("TESTS") in ("all", "gpu")
in_test_all, at_night = pytest.mark.in_test_all, pytest.mark.at_night
in_quiet = pytest.mark.in_quiet
"""Of tests that :func:`assert_soon`: ``make test-quiet`` runs them one by one, with ``QUIET=1``."""
T = TypeVar("T")
Parts = Mapping[str, Hashable]
Epochs = tuple[tuple[int, ...], ...]


def assert_soon(seconds: float, most: float, told: str = "") -> None:
    """Something took less than so many seconds; only where nothing else runs, and so not beside other tests."""
    assert seconds < most or not os.environ.get("QUIET"), told


def parts_in(row: Any) -> Parts:
    """The parts of a row: those of a tuple, or the attributes of an object, in which other such objects may be."""
    if isinstance(row, tuple):
        return {str(at): str(part) for at, part in enumerate(cast("tuple[Any, ...]", row))}
    return {
        f"{name}.{inner}": part
        for name, value in vars(row).items()
        for inner, part in (parts_in(value) if dataclasses.is_dataclass(value) else {"": str(value)}).items()
    }


def all_or_each(rows: Iterable[T], parts_of: Callable[[T], Parts] = parts_in, together: int = 0) -> list[T]:
    """All rows in ``make test-all``; in ``make test`` so few of them that each part still occurs in one.

    Args:
        rows: what there is.
        parts_of: what a row is made of, by name.
        together: 2 if ``make test-all``, too, is to run only so many that each pair of parts which occurs in a row
            still occurs in one, and 1 if it runs what ``make test`` does; the others run at night.
    """
    every = list(rows)
    together = 0 if NIGHT else together if ALL else 1
    if not together:
        return every
    sets = [set(combinations(sorted(parts_of(row).items(), key=lambda part: part[0]), together)) for row in every]
    missing = set[tuple[tuple[str, Hashable], ...]]().union(*sets)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(every)), key=lambda at: len(sets[at] & missing))
        chosen.add(best)
        missing -= sets[best]
    return [row for at, row in enumerate(every) if at in chosen]


def first_and_last(epochs: Epochs) -> Epochs:
    """All epochs at night, or those two: state goes from one to the next, and another rank has no data."""
    return epochs if NIGHT or len(epochs) < 3 else (epochs[0], epochs[-1])


# -- ranks ------------------------------------------------------------------------------------------------------------

SIZE = 4


class Pool:
    """Runs functions as ranks of a process group, in processes that are forked from multiprocessing's forkserver.

    Args:
        prepare: what a rank does with its number ahead of its process group, such as to register a device.
    """

    def __init__(self, prepare: Callable[[int], object] = int) -> None:
        self._prepare = prepare

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        ranks: int = 3,
        timeout: float = 60.0,
        backend: str = "gloo",
        over_group: bool = False,
        bound: bool = False,
    ) -> list[Any]:
        """Run ``fn(rank, *args)`` on every rank with the default process group set up; return the results by rank.

        With ``backend="nccl"`` the group is told the GPU of its rank; with "simccl" it is told the device if it is to
        be ``bound``. Headers go through shared memory, or ``over_group``, as they do between machines.
        """
        from joinables.processes import run

        with tempfile.TemporaryDirectory() as folder:
            call = self._prepare, ranks, f"{folder}/store", backend, over_group, bound, fn, args
            how: dict[str, Any] = {"method": "forkserver", "folder": Path(folder), "limit": timeout}
            results, failures = run(_run, range(ranks), *call, **how)
        assert not failures, "\n".join(f"-- rank {each.rank}: {each.text}\n{each.trace}" for each in failures)
        return [pickle.loads(result) for result in results]


def _run(
    rank: int,
    prepare: Callable[[int], object],
    ranks: int,
    store: str,
    backend: str,
    over_group: bool,
    bound: bool,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> Any:
    import torch
    import torch.distributed as dist

    from joinables.processes import rank_of_group
    from tests.gpus import gpu_of

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", r"Guards may run slower on Python 3\.13\.0")
    warnings.filterwarnings("ignore", r"The ``compute`` method of metric")  # of ranks without data
    os.environ["JOIN_SHARED_MEMORY"] = "0" if over_group else "1"
    prepare(rank)
    device = gpu_of(rank) if "nccl" in backend else None
    if bound or backend == "nccl":
        device = device or torch.device("sim", rank)
    with rank_of_group(rank, ranks, dist.FileStore(store, ranks), backend, 30.0, device_id=device):
        return pickle.dumps(fn(rank, *args))
