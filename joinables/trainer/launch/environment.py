"""Where a process stands in its run (:class:`Place`), and what started it, or will (:class:`Environment`).

:class:`LocalEnvironment` is for processes that the launcher starts itself, on this machine. The environments of
processes that somebody else has started are in ``joinables.trainer.launch.launched``.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist
from typing_extensions import override

LOOPBACK = "127.0.0.1"
"""The address of this machine, for processes that are all on it."""


@dataclass(frozen=True)
class Place:
    """Where a process stands in its run.

    Attributes:
        rank: its number among all processes, from 0.
        world_size: the number of processes.
        local_rank: its number among the processes of the same node, from 0.
        local_world_size: the number of processes of the node, or None where the launcher does not tell.
        node_rank: the number of its node, from 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    node_rank: int


class Environment(ABC):
    """What has started the processes of a run, or will.

    Attributes:
        name: for messages.
        creates_processes: whether whoever uses the environment has to start the processes. If so, ``hosting`` says
            what to give them; if not, this process is one of them.
    """

    name: ClassVar[str]
    creates_processes: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        """Whether ``environ`` says that this launcher started the process; values are not checked yet."""

    @abstractmethod
    def place(self) -> Place:
        """Where this process stands.

        Raises:
            ValueError: if a variable is missing or makes no sense; the message has its name, value and the way out.
        """

    @abstractmethod
    def store(self) -> dist.Store:
        """Connect to the store where the processes meet; rank 0 may have to serve it.

        Raises:
            ValueError: as for ``place``, if the variables do not say where that is.
            torch.distributed.DistError: if it cannot be reached within 5 minutes, or its port is taken.
        """

    def hosting(self, world_size: int) -> AbstractContextManager[Sequence[Environment]]:
        """Serve a store, and get the environment of each process to start, by rank; they can be pickled.

        Raises:
            NotImplementedError: unless ``creates_processes``.
        """
        raise NotImplementedError(
            f"the processes under {self.name} are there already; hosting() is for those that start some [J213]"
        )


_ALONE = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)


class LocalEnvironment(Environment):
    """This machine alone, with processes that are still to be started; the process that starts them serves the store.

    Args:
        place: of a process that was started; without, a run of one process.
        port: where the store is on the loopback interface; without, ``store`` serves a new one on a free port.
    """

    name = "this machine"
    creates_processes = True

    def __init__(self, place: Place = _ALONE, port: int | None = None) -> None:
        self._place, self._port = place, port

    @override
    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        return True

    @override
    def place(self) -> Place:
        return self._place

    @override
    def store(self) -> dist.TCPStore:
        if self._port is not None:
            return dist.TCPStore(LOOPBACK, self._port, is_master=False)
        # Port 0: the system picks a free one, so that two runs never meet. Without a socket of ours, the store would
        # listen on all interfaces. Waiting for workers, which are not started yet, would block.
        listening = socket.create_server((LOOPBACK, 0))
        port = listening.getsockname()[1]
        fd = listening.detach()
        return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)

    @override
    @contextmanager
    def hosting(self, world_size: int) -> Generator[list[LocalEnvironment], None, None]:
        server = self.store()
        try:
            yield [
                LocalEnvironment(Place(rank, world_size, rank, world_size, 0), server.port)
                for rank in range(world_size)
            ]
        finally:
            del server  # an exception that passes here keeps this frame, and would keep the socket
