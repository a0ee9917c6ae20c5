"""Where a process stands in its run (:class:`Place`), and who says so (:class:`Environment`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
"""The address of this machine, for processes that are all on it."""


@dataclass(frozen=True)
class Place:
    """Where a process stands in its run.

    Attributes:
        rank: among all processes, from 0.
        world_size: the number of processes.
        local_rank: among the processes of the same node, from 0.
        local_world_size: the number of processes of the node, or None where the launcher does not tell.
        node_rank: the node's, from 0.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None
    node_rank: int


class Environment(ABC):
    """What started the processes, or will.

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
        """Whether ``environ`` is that of a process which this launcher started. Malformed values do not matter yet."""

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
        raise NotImplementedError(f"the processes under {self.name} are there already")
