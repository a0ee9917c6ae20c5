from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.accelerator import simulated
from tests.accelerator.target import TARGETS, Target, prepare_simulated
from tests.harness import Pool


@pytest.fixture(params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """Each device that tests run on; those that are not here are skipped."""
    if reason := request.param.why_not():
        pytest.skip(reason)
    if request.param.is_simulated:
        request.getfixturevalue("built")
    return request.param


@pytest.fixture(scope="session")
def built() -> None:
    """The simulated accelerator is compiled: what that takes is no part of the time that ranks have."""
    simulated.build()


@pytest.fixture(scope="session")
def simulated_pool(server: None, built: None) -> Iterator[Pool]:
    """Ranks that know the simulated device: all others must not, since torch would have an accelerator there."""
    pool = Pool(prepare_simulated)
    yield pool
    pool.close()


@pytest.fixture
def accelerator_pool(request: pytest.FixtureRequest, target: Target) -> Pool:
    """Ranks that run on the target."""
    return request.getfixturevalue("simulated_pool" if target.is_simulated else "pool")
