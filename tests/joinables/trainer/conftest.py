"""Workers come from a server that has imported everything: one that is spawned imports torch, which takes seconds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from joinables.trainer import Launcher, strategy
from tests.harness import NIGHT


class FromServer(Launcher):
    """A launcher whose workers are not spawned."""

    def __init__(self, world_size: int, *, start_method: Any = "spawn", **options: Any) -> None:
        super().__init__(world_size, start_method="forkserver" if start_method == "spawn" else start_method, **options)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process runs a script, where a worker of pytest-xdist runs ``python -c``, whose calls may be forked."""
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "script.py", raising=False)


@pytest.fixture(autouse=True)
def in_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers write their logs into the current directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def from_server(request: pytest.FixtureRequest, server: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if not NIGHT or request.node.get_closest_marker("spawns") is None:
        monkeypatch.setattr(strategy, "Launcher", FromServer)
