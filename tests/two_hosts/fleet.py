"""Ranks on two hosts, under torchrun: :class:`Fleet`."""

from __future__ import annotations

import time
from pathlib import Path

from tests.ending import End
from tests.harness import NIGHT
from tests.two_hosts.hosts import HOSTS, Hosts
from tests.two_hosts.ranks import PAUSE, Call, Folder

RANKS_OF_HOST = 2
RANKS = HOSTS * RANKS_OF_HOST
START_SECONDS = 90.0  # that torchrun may take beside others, or all ranks until they train
KILL_SECONDS = 20.0  # that killing them may take
MEMORY = {"each host its own memory": (True, True)}
"""Which hosts have processes of their own, by what that means."""
if NIGHT:
    MEMORY |= {"one memory": (False, False), "one host its own memory": (False, True)}


class Fleet:
    """Two ranks on each of two hosts.

    Args:
        memory: who shares memory, a key of :data:`MEMORY`.
        path: a folder for what they tell.

    Raises:
        NoHosts: if there cannot be any.
    """

    def __init__(self, memory: str, path: Path) -> None:
        self.memory = memory
        self._folder, self._asked = Folder(path), 0
        self._hosts = Hosts(MEMORY[memory])
        self._folder.hold()
        self._hosts.torchrun(RANKS_OF_HOST, "tests.two_hosts.ranks", str(path), told=path / "agent")

    def run(self, call: Call) -> list[End]:
        """All ranks make this call, and return from it; how their processes have ended, by rank."""
        self.start([call])
        ends = self.ends(call, time.time() + START_SECONDS)
        assert [end.code for end in ends] == [0] * RANKS, text_of(ends)
        return ends

    def start(self, calls: list[Call]) -> None:
        """All ranks begin to make these calls, at once, when those before them have ended."""
        self._folder.ask(self._asked, calls)
        self._asked += 1

    def ends(self, call: Call, deadline: float) -> list[End]:
        """How the processes of a call end, by rank.

        Args:
            call: the call.
            deadline: when those that are left print their stacks and are killed, in seconds since the epoch.
        """
        patience = max(deadline, time.time()) + KILL_SECONDS
        for rank in range(RANKS):
            while not self._folder.has_ended(call, rank):
                if time.time() > deadline:
                    self._folder.stop(call)
                self._pause(patience)
        return [self._folder.end(call, rank) for rank in range(RANKS)]

    def wait_until_said(self, name: str, calls: list[Call]) -> None:
        """Wait until all ranks have said something of that name in these calls, or have ended."""
        deadline = time.time() + START_SECONDS
        waited_for = [(call, rank) for call in calls for rank in range(RANKS)]
        while waited_for:
            call, rank = waited_for[-1]
            if self._folder.said(name, call, rank) or self._folder.has_ended(call, rank):
                waited_for.pop()
            else:
                self._pause(deadline)

    def _pause(self, deadline: float) -> None:
        if self._hosts.ended() or time.time() > deadline:
            told = "\n".join(file.read_text(errors="replace") for file in self._folder.path.glob("agent-*"))
            raise AssertionError(f"the agents have ended, or the ranks do not come:\n{told}")
        time.sleep(PAUSE)

    def cut(self) -> float:
        """Cut the link between the hosts; when, in seconds since the epoch."""
        self._hosts.cut()
        return time.time()

    def close(self) -> None:
        """End all ranks, and remove their hosts."""
        self._hosts.close()
        self._folder.release()


def text_of(ends: list[End], since: float | None = None) -> str:
    """What ranks have told, and how many seconds ``since`` they have ended."""
    after = ["" if since is None else f" after {end.at - since:.1f} s" for end in ends]
    return "\n".join(f"-- rank {rank}: {end.code}{after[rank]}\n{end.text}" for rank, end in enumerate(ends))
