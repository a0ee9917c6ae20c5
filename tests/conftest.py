from __future__ import annotations

import gc
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from typing_extensions import override
from xdist.scheduler import LoadScopeScheduling

from tests.ending import Ending
from tests.harness import ALL, NIGHT, Pool

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would the processes that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Whoever connects to one of torch's stores asks for the name of its address. Where nobody answers, that takes 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
# The threads of a second processor only wait for work in models this small, and burn it meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests train on the CPU, and torch, the trainer and the frameworks take GPUs where they find any.
if os.environ.get("TESTS") != "gpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# Or an example fails that takes a fifth of a second, as on a busy machine.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")

TOGETHER = (
    "tests/accelerator/test_failures.py",
    "tests/two_hosts/",
    "tests/join/failure/test_ends.py",
    "tests/join/failure/test_hang.py",
    "tests/join/failure/test_stopped.py",
    "tests/joinables/test_dummy_forward.py",
    "tests/docs/test_site.py",
    "tests/joinables/test_explain.py",
    "tests/test_errors.py",
    "tests/test_house.py",
    "tests/test_readme.py::test_tracebacks",
    METRICS := "tests/joinables/metrics/",
)
"""Tests that need the same costly thing, or run several at once, by how their names begin."""


class Scheduling(LoadScopeScheduling):
    """Gives each test to whichever worker is free, and those of each of :data:`TOGETHER` to one; these come first."""

    @override
    def _split_scope(self, nodeid: str) -> str:
        # Not xdist's marker for it: from pytest 9.2 on it changes a name that nobody reads, and so nothing.
        if re.search(r"\[(Metric\]|metrics\.md)", nodeid):  # their ranks import torchmetrics
            return METRICS
        return next((start for start in TOGETHER if nodeid.startswith(start)), nodeid)


LONG = (
    "tests/joinables/trainer/",
    "tests/worlds/",
    *(f"tests/test_{name}.py" for name in ("scripts", "wheel", "package", "readme", "mutants")),
)
"""Tests that take or wait for seconds: were they the last ones, workers would run out of others to run beside them."""

WHOLE = (
    "tests/dropin/",
    "tests/joinables/ddp/test_exact.py",
    "tests/joinables/ddp/test_loops.py",
    "tests/joinables/ddp/test_ways_of_losses.py",
    "tests/joinables/test_random.py",
)
"""Tests of which ``make test`` runs each case that it has: what most of this project is for."""


def with_a_fifth(items: list[pytest.Item]) -> list[pytest.Item]:
    """These tests, with a fifth of the cases of each that uses processes, from the first to the last.

    At least one remains, and one with each value of a parameter that has two.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_whole = {"ending", "server"}.isdisjoint(getattr(item, "fixturenames", ())) or item.nodeid.startswith(WHOLE)
        cases.setdefault(item.nodeid if is_whole else item.nodeid.partition("[")[0], []).append(item)
    chosen: set[pytest.Item] = set()
    for each in cases.values():
        count = -(-len(each) // 5)
        spread = [each[at * (len(each) - 1) // max(1, count - 1)] for at in range(count)]
        options = {item: {(name, str(value)) for name, value in params_of(item).items()} for item in each}
        numbers = Counter(name for name, _ in set[tuple[str, str]]().union(*options.values()))
        seen = set[tuple[str, str]]()
        for item in (*spread, *each):
            few = {option for option in options[item] if numbers[option[0]] <= 2}
            if item in spread or not few <= seen:
                chosen.add(item)
                seen |= few
    return [item for item in items if item in chosen]


def params_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}


@pytest.hookimpl(trylast=True)  # a fifth of the cases that -k leaves
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not NIGHT and not any("::" in arg for arg in config.args):
        marks = ("at_night",) if ALL else ("at_night", "in_test_all")
        chosen = [item for item in items if not any(item.get_closest_marker(mark) for mark in marks)]
        chosen = chosen if ALL else with_a_fifth(chosen)
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen
    if "PYTEST_XDIST_WORKER" in os.environ:
        long = [item for item in items if item.nodeid.startswith(LONG)]
        short = [item for item in items if not item.nodeid.startswith(LONG)]
        between = 3 * len(short) // (4 * max(len(long), 1))  # so that they are begun in the first three quarters
        items[:] = [each for at, item in enumerate(long) for each in (item, *short[at * between : (at + 1) * between])]
        items += short[len(long) * between :]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage meanwhile: importing makes little, and a fifth of the time went into looking for it."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep what importing has made out of later collections: pytest ends with five of them, of a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # there is none where xdist is switched off
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling:
    return Scheduling(config, log)


@pytest.fixture(scope="session")
def server() -> None:
    """multiprocessing's forkserver, with everything imported.

    It starts before any test has a folder of its own for temporary files, in which the server's socket would be.
    """
    multiprocessing.set_forkserver_preload(["tests.preloaded"])
    forkserver.ensure_running()


@pytest.fixture(scope="session")
def pool(server: None) -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def equals_one_process(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``joinables.testing.assert_equals_one_process``, on the ranks of the pool."""
    from joinables import testing  # not above: it imports torch

    def run(fn: Callable[..., Any], ranks: int, *args: Any, **how: Any) -> list[Any]:
        return pool.run(fn, *args, ranks=ranks, **how)

    monkeypatch.setattr(testing, "run_ranks", run)
    return testing.assert_equals_one_process


@pytest.fixture(scope="session")
def ending() -> Iterator[Ending]:
    ending = Ending()
    yield ending
    ending.close()


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a short name: that of a socket may have 107 characters, and ``tmp_path`` has most of them."""
    tmp_path_factory.getbasetemp()  # made before a test changes where temporary files go
    folder = Path(tempfile.mkdtemp(prefix="join-test-"))
    yield folder
    shutil.rmtree(folder)
