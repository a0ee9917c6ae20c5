"""One suite over every environment, on variables recorded from the launchers; torchrun itself is in test_launcher."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch.distributed as dist

from joinables.trainer.launch.environment import Environment, LocalEnvironment, Place
from joinables.trainer.launch.launched import (
    Launched,
    MpiEnvironment,
    SlurmEnvironment,
    TorchrunEnvironment,
    detect_environment,
    first_host,
    tasks_per_node,
)

TORCHRUN = {
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "34789",
    "RANK": "2",
    "ROLE_RANK": "2",
    "ROLE_WORLD_SIZE": "4",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "077821ed-d566-43d2-8817-92ae187d2697",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "WORLD_SIZE": "4",
}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_JOB_ID": "1200505",
    "SLURM_JOB_NAME": "train",
    "SLURM_JOB_NODELIST": "gnode[010,020-025,37]",
    "SLURM_JOB_NUM_NODES": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_NODELIST": "gnode[010,020-025,37]",
    "SLURM_NPROCS": "5",
    "SLURM_NTASKS": "5",
    "SLURM_PROCID": "4",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "gnode[020,022,37]",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_TASKS_PER_NODE": "2(x7)",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_UNIVERSE_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-node1-4711@1",
    "PMIX_RANK": "1",
}
HYDRA = {
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
SALLOC_SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "interactive", "SLURM_NTASKS": "4"}
INTERACTIVE_STEP = SALLOC_SHELL | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
SRUN_PTY = SRUN | {"SLURM_JOB_NAME": "bash", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}

RECORDED: list[tuple[str, Mapping[str, str], type[Environment], Place]] = [
    ("torchrun", TORCHRUN, TorchrunEnvironment, Place(2, 4, 0, 2, 1)),
    ("by hand", BY_HAND, TorchrunEnvironment, Place(1, 2, 1, None, 0)),
    ("srun", SRUN, SlurmEnvironment, Place(4, 5, 0, 1, 2)),
    ("srun from salloc", SRUN | {"SLURM_JOB_NAME": "interactive"}, SlurmEnvironment, Place(4, 5, 0, 1, 2)),
    ("Open MPI", OPEN_MPI, MpiEnvironment, Place(1, 2, 1, 2, 0)),
    ("Hydra", HYDRA, MpiEnvironment, Place(3, 4, 1, 2, 1)),
    ("torchrun in srun", SRUN | TORCHRUN, TorchrunEnvironment, Place(2, 4, 0, 2, 1)),
    ("mpirun in sbatch", SRUN | OPEN_MPI, MpiEnvironment, Place(1, 2, 1, 2, 0)),
    ("mpiexec in sbatch", SRUN | HYDRA, MpiEnvironment, Place(3, 4, 1, 2, 1)),
    ("srun with PMI", SRUN | {"PMI_RANK": "4", "PMI_SIZE": "5"}, SlurmEnvironment, Place(4, 5, 0, 1, 2)),
    ("salloc", SALLOC_SHELL, LocalEnvironment, Place(0, 1, 0, 1, 0)),
    ("salloc as a step", INTERACTIVE_STEP, LocalEnvironment, Place(0, 1, 0, 1, 0)),
    ("srun --pty bash", SRUN_PTY, LocalEnvironment, Place(0, 1, 0, 1, 0)),
    ("nothing", {"HOME": "/root", "RANK": "7"}, LocalEnvironment, Place(0, 1, 0, 1, 0)),
]


@pytest.mark.parametrize(("recorded", "cls", "place"), [each[1:] for each in RECORDED], ids=[e[0] for e in RECORDED])
def test_conformance(recorded: Mapping[str, str], cls: type[Environment], place: Place) -> None:
    assert cls.detect(recorded)
    environment = detect_environment(recorded)
    assert type(environment) is cls
    assert environment.name
    assert environment.place() == place
    assert environment.creates_processes == (cls is LocalEnvironment)
    if environment.creates_processes:
        with environment.hosting(3) as ranks:
            assert [each.place() for each in ranks] == [Place(rank, 3, rank, 3, 0) for rank in range(3)]
            stores = [pickle.loads(pickle.dumps(each)).store() for each in ranks]
            stores[0].set("key", "value")
            assert stores[2].get("key") == b"value"
    else:
        with pytest.raises(NotImplementedError, match="there already"):
            environment.hosting(3)


MALFORMED: list[tuple[type[Environment], Mapping[str, str], str]] = [
    (TorchrunEnvironment, TORCHRUN | {"RANK": "abc"}, "RANK='abc' must be a whole number; torchrun should set RANK"),
    (TorchrunEnvironment, TORCHRUN | {"RANK": "-1"}, "RANK='-1' must be a whole number"),
    (TorchrunEnvironment, TORCHRUN | {"RANK": "4"}, "RANK='4' must be below WORLD_SIZE, which is 4"),
    (TorchrunEnvironment, TORCHRUN | {"WORLD_SIZE": ""}, "WORLD_SIZE is not set; .* pass environment=LocalEnvironment"),
    (TorchrunEnvironment, TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be at least 1"),
    (TorchrunEnvironment, TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK='2' must be below LOCAL_WORLD_SIZE, which is 2"),
    (TorchrunEnvironment, TORCHRUN | {"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
    (TorchrunEnvironment, TORCHRUN | {"MASTER_PORT": "65536"}, "MASTER_PORT='65536' must be below the number of ports"),
    (SlurmEnvironment, SRUN | {"SLURM_PROCID": "5"}, "SLURM_PROCID='5' must be below SLURM_NTASKS, which is 5"),
    (SlurmEnvironment, SRUN | {"SLURM_LOCALID": "x"}, "SLURM_LOCALID='x' must be a whole number"),
    (SlurmEnvironment, SRUN | {"SLURM_STEP_NODELIST": "node[3"}, r"SLURM_STEP_NODELIST='node\[3': .* set MASTER_ADDR"),
    (MpiEnvironment, OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK='2' must be below"),
    (MpiEnvironment, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": ""}, "OMPI_COMM_WORLD_SIZE is not set; MPI's mpirun should"),
    (MpiEnvironment, OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4"}, "MASTER_ADDR and MASTER_PORT must be set: .*mpirun -x"),
    (MpiEnvironment, HYDRA | {"MASTER_ADDR": ""}, "MASTER_ADDR must be set"),
    (MpiEnvironment, HYDRA | {"MASTER_PORT": "", "PMI_RANK": "1", "PMI_SIZE": "2"}, "^MASTER_PORT must be set"),
]


@pytest.mark.parametrize(("cls", "variables", "message"), MALFORMED)
def test_malformed_variables(cls: type[Environment], variables: Mapping[str, str], message: str) -> None:
    environment = detect_environment(variables)
    assert type(environment) is cls
    with pytest.raises(ValueError, match=message):
        environment.store()  # asks for the place first


def address(variables: Mapping[str, str]) -> tuple[str, int]:
    environment = detect_environment(variables)
    assert isinstance(environment, Launched)
    return environment.address(environment.place())


def test_where_the_store_is() -> None:
    assert address(TORCHRUN) == ("localhost", 34789)
    assert address(SRUN) == ("gnode020", 15505)
    assert address({**SRUN, "SLURM_STEP_NODELIST": "", "MASTER_PORT": "1234"}) == ("gnode010", 1234)
    assert address(SRUN | {"MASTER_ADDR": "10.0.0.1"}) == ("10.0.0.1", 15505)
    assert address(HYDRA) == ("node1", 29500)
    host, port = address(OPEN_MPI)
    assert host == "127.0.0.1"
    assert 15000 <= port < 25000
    assert address(OPEN_MPI | {"MASTER_PORT": "29501"}) == ("127.0.0.1", 29501)


def test_rank_0_serves_the_store_unless_an_agent_does() -> None:
    port = str(random.randrange(25000, 30000))
    variables = BY_HAND | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    served = TorchrunEnvironment(variables).store()
    served.set("key", "value")
    assert TorchrunEnvironment(variables).store() is served  # another launcher in the same process
    client = TorchrunEnvironment(variables | {"RANK": "1"}).store()
    assert client.get("key") == b"value"
    client = TorchrunEnvironment(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).store()
    assert isinstance(client, dist.TCPStore)
    assert client.get("key") == b"value"


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node003", "node003"),
        ("node[003-005,9]", "node003"),
        ("node[9,003-005],login", "node9"),
        ("login1,node[1-2]", "login1"),
        ("rack[2-3]node[01-04].cluster", "rack2node01.cluster"),
        ("gpu-a100-01", "gpu-a100-01"),
    ],
)
def test_first_host(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


@pytest.mark.parametrize("nodes", ["", "node[", "node[]", "[a-b]", "a b"])
def test_no_list_of_nodes(nodes: str) -> None:
    with pytest.raises(ValueError, match="not a list of nodes"):
        first_host(nodes)


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x2),1") == [2, 2, 1]
    assert tasks_per_node("4") == [4]
    assert tasks_per_node("") == tasks_per_node("many") == []


def test_the_store_listens_on_this_machine_alone() -> None:
    store = LocalEnvironment().store()
    sockets = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()]
    listening = [local for _, local, _, state, *_ in sockets if state == "0A"]
    assert [local for local in listening if local.endswith(f":{store.port:04X}")] == [f"0100007F:{store.port:04X}"]
