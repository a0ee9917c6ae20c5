"""What is common to collectives that keep their texts in a ``torch.distributed.Store``: :class:`StoreCollective`."""

from __future__ import annotations

import socket
from abc import abstractmethod

import torch.distributed as dist
from typing_extensions import final, override

from join.collectives.base import Collective
from join.collectives.board import Board, StoreBoard
from join.collectives.fresh_store import fresh_store


class StoreCollective(Collective):
    """A collective with a store of torch's."""

    @property
    @abstractmethod
    def _store(self) -> dist.Store: ...

    @final
    @override
    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    @override
    def get(self, key: str) -> str:
        return self._store.get(key).decode()

    @final
    @override
    def check(self, key: str) -> bool:
        return self._store.check([key])

    @final
    @override
    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    @override
    def board(self) -> Board:
        return StoreBoard(self.rank, self.world_size, self._store)

    @final
    def _own_store(self, given: dist.Store | None) -> dist.Store:
        """For backends without a store: a part of the one given, or one that rank 0 opens; all ranks call it.

        Rank 0 tells the others where it is by their own collectives.
        """
        if given is not None:
            return fresh_store(given, self.rank, self.world_size)
        names: list[str] = self.all_gather_object(socket.gethostname())
        host = "127.0.0.1" if len(set(names)) == 1 else names[0]
        if self.rank == 0:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self.broadcast_object(store.port, 0)
            return store
        return dist.TCPStore(host, self.broadcast_object(None, 0), is_master=False, wait_for_workers=False)
