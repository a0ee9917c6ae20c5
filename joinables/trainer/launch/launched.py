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
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import NoReturn

import torch.distributed as dist
from typing_extensions import override

from joinables.trainer.launch.environment import LOOPBACK, Environment, LocalEnvironment, Place

_served: dict[tuple[str, int], dist.TCPStore] = {}
"""The stores that this process serves as rank 0, until it ends: other ranks may need them longer."""

_FIRST_PORT, _PORTS = 15000, 10000  # below the range from which systems hand out ports to clients


class Launched(Environment):
    """A launcher that has started this process and says so in environment variables.

    Args:
        environ: the variables; those of this process by default.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = os.environ if environ is None else environ

    @override
    def store(self) -> dist.Store:
        place = self.place()
        host, port = self.address(place)
        if place.rank != 0 or self._is_served():
            return dist.TCPStore(host, port, place.world_size, is_master=False)
        if (host, port) not in _served:
            # Multi-tenant: the script itself may have made a process group on the same port.
            _served[host, port] = dist.TCPStore(
                host, port, place.world_size, is_master=True, wait_for_workers=False, multi_tenant=True
            )
        return _served[host, port]

    def _is_served(self) -> bool:
        """Whether the launcher itself serves the store."""
        return False

    @abstractmethod
    def address(self, place: Place) -> tuple[str, int]:
        """Host and port of the store."""

    def _read_place(self, rank: str, world_size: str, local_rank: str, local_world_size: str) -> Place:
        """Where the variables of these names, of which the last may be missing, say that this process stands."""
        ranks = self._number(world_size, least=1)
        local = self._number(local_world_size, least=1) if self._environ.get(local_world_size) else None
        number = self._number(rank, below=(world_size, ranks))
        below = (world_size, ranks) if local is None else (local_world_size, local)
        node = 0 if local is None else number // local
        return Place(number, ranks, self._number(local_rank, below=below), local, node)

    def _text(self, *names: str) -> tuple[str, str]:
        """The first variable of ``names`` that is set, and its value."""
        for name in names:
            if text := self._environ.get(name):
                return name, text
        self._refuse(names[0], f"{' or '.join(names)} is not set")

    def _number(self, *names: str, least: int = 0, below: tuple[str, int] | None = None) -> int:
        """The first variable of ``names`` that is set, as a number; ``below`` has a limit, and what it is."""
        name, text = self._text(*names)
        if not re.fullmatch(r"\d+", text):
            self._refuse(name, f"{name}={text!r} must be a whole number")
        if int(text) < least:
            self._refuse(name, f"{name}={text!r} must be at least {least}")
        if below is not None and int(text) >= below[1]:
            self._refuse(name, f"{name}={text!r} must be below {below[0]}, which is {below[1]}")
        return int(text)

    def _port(self) -> int:
        return self._number("MASTER_PORT", least=1, below=("the number of ports", 1 << 16))

    def _refuse(self, name: str, wrong: str) -> NoReturn:
        raise ValueError(
            f"{wrong}; {self.name} should set {name} for each process. Start the script with it, or pass"
            " environment=LocalEnvironment() to ignore its variables [J218]"
        )


class TorchrunEnvironment(Launched):
    """torchrun, or whoever sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``.

    torchrun's agent serves the store (``TORCHELASTIC_USE_AGENT_STORE``), with what ranks from before a restart have put
    there; without an agent rank 0 does.
    """

    name = "torchrun"

    @override
    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        # RANK alone is too common a name to tell anything.
        by_hand = "RANK" in environ and ("WORLD_SIZE" in environ or "LOCAL_RANK" in environ)
        return by_hand or "TORCHELASTIC_RUN_ID" in environ

    @override
    def place(self) -> Place:
        place = self._read_place("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return replace(place, node_rank=self._number("GROUP_RANK") if self._environ.get("GROUP_RANK") else 0)

    @override
    def _is_served(self) -> bool:
        return self._environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)

    @override
    def address(self, place: Place) -> tuple[str, int]:
        return self._text("MASTER_ADDR")[1], self._port()


class SlurmEnvironment(Launched):
    """srun: one task a process. Rank 0, on the first node of the step, serves the store.

    The port follows from the job's number; two steps of one job at the same time need a ``MASTER_PORT`` each.
    ``MASTER_ADDR`` says where rank 0 is if the first node's name cannot be resolved. A batch script that calls python
    without srun looks like task 0 of them all, and waits for the others in vain.
    """

    name = "SLURM's srun"

    @override
    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        if "SLURM_JOB_ID" not in environ or "SLURM_PROCID" not in environ:
            return False  # no job, or the shell that salloc opens
        if "OMPI_COMM_WORLD_RANK" in environ or "MPI_LOCALRANKID" in environ:
            return False  # mpirun inside an allocation: its processes all inherit the number of the task that called it
        job = environ.get("SLURM_JOB_NAME")
        # salloc's shell may be a step of its own, of one task; what srun starts from there has its name, too.
        alone = environ.get("SLURM_STEP_NUM_TASKS", "1") == "1"
        return job != "bash" and not (job == "interactive" and alone)

    @override
    def place(self) -> Place:
        world_size = self._number("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", least=1)
        node = self._number("SLURM_NODEID")
        local = self._local_world_size(node, world_size)
        below = ("SLURM_NTASKS", world_size) if local is None else ("the node's number of tasks", local)
        return Place(
            rank=self._number("SLURM_PROCID", below=("SLURM_NTASKS", world_size)),
            world_size=world_size,
            local_rank=self._number("SLURM_LOCALID", below=below),
            local_world_size=local,
            node_rank=node,
        )

    def _local_world_size(self, node: int, world_size: int) -> int | None:
        of_job = self._environ.get("SLURM_TASKS_PER_NODE", "")
        tasks = tasks_per_node(self._environ.get("SLURM_STEP_TASKS_PER_NODE") or of_job)
        # A job's list where the step's is missing may be another one.
        return tasks[node] if sum(tasks) == world_size and node < len(tasks) else None

    @override
    def address(self, place: Place) -> tuple[str, int]:
        host = self._environ.get("MASTER_ADDR")
        if not host:
            name, nodes = self._text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
            try:
                host = first_host(nodes)
            except ValueError as unreadable:
                raise ValueError(f"{name}={nodes!r}: {unreadable}") from None
        if self._environ.get("MASTER_PORT"):
            return host, self._port()
        return host, _FIRST_PORT + self._number("SLURM_JOB_ID") % _PORTS


class MpiEnvironment(Launched):
    """mpirun or mpiexec of Open MPI, or of MPICH and Intel MPI, whose variables are Hydra's. Rank 0 serves the store.

    None of them says on which node rank 0 is: a run on several nodes needs ``MASTER_ADDR`` and ``MASTER_PORT``. On one
    node the address is the loopback's; the port follows from the job's name (``PMIX_NAMESPACE``), which Open MPI sets,
    and has to be given as ``MASTER_PORT`` with Hydra. Nodes are numbered as if each had a block of consecutive ranks.
    """

    name = "MPI's mpirun"

    @override
    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> bool:
        return "OMPI_COMM_WORLD_RANK" in environ or "PMI_RANK" in environ

    @override
    def place(self) -> Place:
        if self._environ.get("OMPI_COMM_WORLD_RANK"):
            names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
            return self._read_place(*names)
        return self._read_place("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")

    @override
    def address(self, place: Place) -> tuple[str, int]:
        host, port, job = (self._environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE"))
        if not host and place.world_size == (place.local_world_size or 1):
            host = LOOPBACK
            if job and not port:
                return host, _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
        if host and port:
            return host, self._port()
        missing = [name for name, there in (("MASTER_ADDR", host), ("MASTER_PORT", port)) if not there]
        raise ValueError(
            f"{' and '.join(missing)} must be set: mpirun does not say where rank 0 can be reached. Export the name"
            " of its node, and a free port of it, to all processes: mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500"
            " with Open MPI, mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 with MPICH and Intel MPI [J219]"
        )


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


def first_host(nodes: str) -> str:
    """The first name in a list of nodes as SLURM writes it: ``node003`` in ``node[003-005,9],login``.

    Raises:
        ValueError: if it is no such list.
    """
    found = re.match(r"(?:[\w.-]|\[\d+[\d,-]*\])+(?=,|$)", nodes)
    if found is None:
        raise ValueError("not a list of nodes like node[003-005,9]; set MASTER_ADDR to the node of rank 0 [J220]")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", found.group())


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks on each node, from what SLURM writes: ``[2, 2, 1]`` for ``2(x2),1``; empty if unreadable."""
    parts = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))] if all(parts) else []
