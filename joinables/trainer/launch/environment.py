"""What started this process: :func:`detect_environment`, and :class:`LocalEnvironment` where nothing did.

Either somebody has started the processes already and says so in environment variables, which is what
``joinables.trainer.launch.launched`` reads, or nobody has, and :class:`LocalEnvironment` is for a launcher that starts
them itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from typing_extensions import override

from joinables.trainer.launch.launched import MpiEnvironment, SlurmEnvironment, TorchrunEnvironment
from joinables.trainer.launch.place import LOOPBACK, Environment, Place

__all__ = ["Environment", "LocalEnvironment", "Place", "detect_environment"]

_ALONE = Place(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0)


class LocalEnvironment(Environment):
    """This machine alone, and nothing started yet. The process that starts the others serves the store.

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
        # Port 0: the system picks a free one, so that two runs never meet. The store would listen on all interfaces.
        # Waiting for workers that are not started yet would block.
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


def detect_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Find out what started this process: torchrun, else SLURM, else MPI, else nothing of these.

    Args:
        environ: the variables; those of this process by default.
    """
    environ = os.environ if environ is None else environ
    # torchrun is often called by srun or mpirun, once a node: the innermost launcher started this process.
    for cls in (TorchrunEnvironment, SlurmEnvironment, MpiEnvironment):
        if cls.detect(environ):
            return cls(environ)
    return LocalEnvironment()
