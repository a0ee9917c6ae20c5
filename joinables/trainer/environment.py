"""Processes that somebody else has started: torchrun, SLURM's srun, MPI's mpirun; :func:`detect_environment`.

These launchers say in environment variables which process this is, and where the processes meet. The variables are
read, never set.

Sources: "torchrun (Elastic Launch)" in PyTorch's documentation; "OUTPUT ENVIRONMENT VARIABLES" in srun(1);
"Environment variables set for MPI applications" in Open MPI's documentation; Hydra's variables as MPICH and Intel MPI
set them.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch.distributed as dist

LOOPBACK = "127.0.0.1"
"""The address of this machine, for processes that are all on it."""

_served: dict[tuple[str, int], dist.TCPStore] = {}
"""The stores that this process serves as rank 0, until it ends: other ranks may need them longer."""

_FIRST_PORT, _PORTS = 15000, 10000  # below the range from which systems hand out ports to clients


@dataclass(frozen=True)
class Place:
    """Where a process stands in its run.

    Attributes:
        rank: its number among all processes, from 0.
        world_size: the number of processes.
        local_rank: its number among the processes of the same node, from 0.
    """

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Environment:
    """A launcher that has started this process and says so in environment variables.

    With torchrun, its agent serves the store where the processes meet (``TORCHELASTIC_USE_AGENT_STORE``), with what
    ranks from before a restart have put there; elsewhere rank 0 does. With SLURM that is on the first node of the step,
    unless ``MASTER_ADDR`` says something else, and the port follows from the job's number: two steps of one job at the
    same time need a ``MASTER_PORT`` each. A batch script that calls python without srun looks like task 0 of them all,
    and waits for the others in vain. MPI does not say where rank 0 is: a run on several nodes needs both variables; on
    one node the port follows from the job's name (``PMIX_NAMESPACE``), which Open MPI sets, and Hydra does not.

    Attributes:
        name: for messages.
        environ: the variables.
        names: of the variables with the rank, the number of ranks, and the rank on this node.
    """

    name: str
    environ: Mapping[str, str]
    names: tuple[str, str, str]

    @property
    def place(self) -> Place:
        """Where this process stands.

        Raises:
            ValueError: if a variable is missing or makes no sense.
        """
        place = Place(*map(self._number, self.names))
        if place.rank >= place.world_size:
            self._refuse(f"{self.names[0]}={place.rank} must be below {self.names[1]}={place.world_size}")
        return place

    def store(self) -> dist.Store:
        """Connect to the store where the processes meet; rank 0 may have to serve it.

        Raises:
            ValueError: as for ``place``, if the variables do not say where that is.
            torch.distributed.DistError: if it cannot be reached within 5 minutes, or its port is taken.
        """
        place, address = self.place, self.address()
        if place.rank != 0 or self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            return dist.TCPStore(*address, place.world_size, is_master=False)
        if address not in _served:
            # Multi-tenant: the script itself may have made a process group on the same port.
            _served[address] = dist.TCPStore(
                *address, place.world_size, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        return _served[address]

    def address(self) -> tuple[str, int]:
        """Host and port of the store."""
        get = self.environ.get
        host, port = get("MASTER_ADDR"), self._number("MASTER_PORT") if get("MASTER_PORT") else None
        if self.names[0] == "SLURM_PROCID":
            host = host or _first_host(get("SLURM_STEP_NODELIST") or get("SLURM_JOB_NODELIST") or "")
            port = port or _FIRST_PORT + self._number("SLURM_JOB_ID") % _PORTS
        elif str(self.place.world_size) in (get("OMPI_COMM_WORLD_LOCAL_SIZE"), get("MPI_LOCALNRANKS")):
            host = host or LOOPBACK
            if job := get("PMIX_NAMESPACE"):
                port = port or _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
        if not host or not port:
            self._refuse("MASTER_ADDR and MASTER_PORT must be set, to the name of rank 0's node and a free port of it")
        return host, port

    def _number(self, name: str) -> int:
        text = self.environ.get(name, "")
        if not re.fullmatch(r"\d+", text):
            self._refuse(f"{name}={text!r} must be a whole number")
        return int(text)

    def _refuse(self, wrong: str) -> NoReturn:
        raise ValueError(
            f"{wrong}; {self.name} has started this process, or should have: start the script with it, such that all"
            " processes have this variable, or unset its variables [J410]"
        )


def detect_environment(environ: Mapping[str, str] | None = None) -> Environment | None:
    """Find out what started this process: torchrun, else SLURM, else MPI; ``None`` for nothing of these.

    Args:
        environ: the variables; those of this process by default.
    """
    environ = os.environ if environ is None else environ
    # torchrun is often called by srun or mpirun, once a node: the innermost launcher started this process.
    # RANK alone is too common a name to tell anything.
    by_hand = "RANK" in environ and ("WORLD_SIZE" in environ or "LOCAL_RANK" in environ)
    if by_hand or "TORCHELASTIC_RUN_ID" in environ:
        return Environment("torchrun", environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    # mpirun inside an allocation of SLURM: its processes all inherit the number of the task that called it.
    by_mpi = "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ
    if "SLURM_JOB_ID" in environ and "SLURM_PROCID" in environ and not by_mpi:
        # salloc's shell may be a step of its own, of one task; what srun starts from there has its name, too.
        job, alone = environ.get("SLURM_JOB_NAME"), environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
        if job != "bash" and not (job == "interactive" and alone):
            return Environment("SLURM's srun", environ, ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
    if "OMPI_COMM_WORLD_RANK" in environ:
        of_mpi = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
        return Environment("MPI's mpirun", environ, of_mpi)
    if "PMI_RANK" in environ:
        return Environment("MPI's mpiexec", environ, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"))
    return None


def _first_host(nodes: str) -> str:
    """The first name in a list of nodes as SLURM writes it: ``node003`` in ``node[003-005,9],login``; or ``""``."""
    found = re.match(r"(?:[\w.-]|\[\d+[\d,-]*\])+(?=,|$)", nodes)
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", found.group()) if found else ""
