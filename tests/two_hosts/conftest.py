from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.two_hosts.fleet import MEMORY, Fleet
from tests.two_hosts.hosts import NoHosts


@pytest.fixture(scope="package")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Fleet]]:
    """Two ranks on each of two hosts, for each way to share memory; they start at once, and wait for each other."""
    with ExitStack() as closing:
        found: dict[str, Fleet] = {}
        for memory in MEMORY:
            try:
                found[memory] = Fleet(memory, tmp_path_factory.mktemp("two-hosts"))
            except NoHosts as error:
                pytest.skip(str(error))
            closing.callback(found[memory].close)
        yield found
