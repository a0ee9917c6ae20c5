"""The suite over fakes of Horovod and PyTorch/XLA. ``make test-horovod test-xla`` runs it over the libraries."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from join import Join, PeerError
from join.collectives import Collective
from join.collectives.horovod import HorovodCollective
from join.collectives.xla import XLACollective
from tests.conformance.collective_suite import CHECKS_OVER_LIBRARY, check_over_library, fails, times_out
from tests.conformance.fakes import Horovod, over_horovod, over_xla
from tests.ending import Ending
from tests.harness import Pool, all_or_each, in_test_all

RANKS = 3
Over = Callable[[int, int, dist.Store], AbstractContextManager[Collective]]
LIBRARIES = [over_horovod, over_xla]


def in_group(rank: int, over: Over, *checks: Callable[[Collective], None], times: int = 1) -> None:
    store: Any = dist.distributed_c10d._get_default_store()
    size = dist.get_world_size()
    with over(rank, size, dist.PrefixStore("library", store)) as collective:
        check_over_library(collective, rank, size, *checks, times=times)


conform = partial(in_group, times=2)
"""Ranks are in different places after a failure. Otherwise a collective may be set up again."""


@in_test_all
@pytest.mark.parametrize(("over", "over_group"), all_or_each(product(LIBRARIES, [True, False])))
def test_conforms(pool: Pool, over: Over, over_group: bool) -> None:
    pool.run(conform, over, *CHECKS_OVER_LIBRARY, ranks=RANKS, over_group=over_group)


@in_test_all
@pytest.mark.parametrize("over", LIBRARIES)
def test_alone(pool: Pool, over: Over) -> None:
    pool.run(conform, over, *CHECKS_OVER_LIBRARY, ranks=1)


@pytest.mark.parametrize(
    ("over", "check", "over_group"), all_or_each(product(LIBRARIES, [fails, times_out], [True, False]))
)
def test_ends(ending: Ending, over: Over, check: Callable[[Collective], None], over_group: bool) -> None:
    for end in ending.ends(in_group, over, check, over_group=over_group):
        assert end.code == 0, end.text


def fails_while_others_wait(collective: Collective) -> None:
    """The other ranks wait in an operation of Horovod that the script has started, and read no notes."""
    hvd: Any = collective._hvd  # type: ignore[attr-defined]
    raised = collective.rank == 1
    expected = pytest.raises(KeyError) if raised else pytest.raises(PeerError, match="rank 1 failed: KeyError: 'mine'")
    with expected, Join([], process_group=collective) as join:
        for step in join.iterate(range(3)):
            if raised and step == 1:
                raise KeyError("mine")
            handle = hvd.allreduce_async_(torch.ones(1), name=f"of the script {step}", op=hvd.Sum)
            while not hvd.poll(handle):
                pass
            hvd.synchronize(handle)


def test_a_rank_fails_while_others_wait_in_horovod(ending: Ending) -> None:
    for end in ending.ends(in_group, over_horovod, fails_while_others_wait):
        assert end.code == 0, end.text


def shuts_down_what_it_has_started(collective: Collective) -> None:
    hvd: Horovod = collective._hvd  # type: ignore[attr-defined]
    assert hvd.is_up
    collective.teardown()
    assert not hvd.is_up
    hvd.init()
    collective.setup(hvd.rank(), hvd.size())
    collective.teardown()
    assert hvd.is_up


def test_horovod_is_shut_down_by_those_who_started_it(pool: Pool) -> None:
    pool.run(in_group, over_horovod, shuts_down_what_it_has_started, ranks=1)


def test_a_process_of_horovod_is_not_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ValueError, match="J022"):
        Join([], process_group=None)


@pytest.mark.parametrize(
    ("collective", "package", "code"),
    [(HorovodCollective, "horovod", "J861"), (XLACollective, "torch_xla", "J863")],
)
def test_a_missing_package_is_named(collective: Callable[[], Any], package: str, code: str) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=rf"^{collective.__name__} needs .*not installed\. Run .*\[{code}\]"):  # type: ignore[attr-defined]
        collective()
