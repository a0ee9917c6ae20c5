"""Ranks on two hosts, under torchrun: :class:`Fleet`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typing_extensions import override

from tests.ending import Forks, Running
from tests.harness import NIGHT
from tests.two_hosts.hosts import HOSTS, Hosts

RANKS_OF_HOST = 2
RANKS = HOSTS * RANKS_OF_HOST
START_SECONDS = 90.0  # that torchrun may take beside others, or all ranks until they train
MEMORY = {"each host its own memory": (True, True)}
"""Which hosts have processes of their own, by what that means."""
if NIGHT:
    MEMORY |= {"one memory": (False, False), "one host its own memory": (False, True)}


def as_errors(rank: int) -> None:
    """A rank raises its warnings."""
    warnings.simplefilter("error")


class Fleet(Forks):
    """Two ranks on each of two hosts.

    Args:
        memory: who shares memory, a key of :data:`MEMORY`.
        path: a folder for what they tell.

    Raises:
        NoHosts: if there cannot be any.
    """

    def __init__(self, memory: str, path: Path) -> None:
        self.memory = memory
        self._hosts = Hosts(MEMORY[memory])
        super().__init__(path)
        self._hosts.torchrun(RANKS_OF_HOST, "tests.ending", str(path), told=path / "agent")

    @override
    def start(self, fn: Callable[..., Any], *args: Any, **how: Any) -> Running:
        return super().start(fn, *args, ranks=RANKS, limit=START_SECONDS, prepare=as_errors, **how)

    @override
    def pause(self) -> None:
        told = "\n".join(file.read_text(errors="replace") for file in self.folder.glob("agent-*"))
        assert not self._hosts.ended(), f"the agents have ended:\n{told}"
        super().pause()

    def cut(self) -> None:
        """Cut the link between the hosts."""
        self._hosts.cut()

    @override
    def close(self) -> None:
        try:
            super().close()
        finally:
            self._hosts.close()
