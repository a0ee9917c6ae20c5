"""The environment of torchrun, on variables recorded from it; torchrun itself is in test_launch."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping

import pytest
import torch.distributed as dist

from joinables.trainer.launch import Place, _store_of, launcher_of, place_of
from joinables.trainer.rendezvous import job_of

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
ONE_BY_HAND = {"RANK": "0", "WORLD_SIZE": "1"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "4", "SLURM_NTASKS": "5", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0"}

RECORDED: list[tuple[str, Mapping[str, str], Place | None]] = [
    ("torchrun", TORCHRUN, Place(2, 4, 0)),
    ("by hand", BY_HAND, Place(1, 2, 1)),
    ("one process by hand", ONE_BY_HAND, Place(0, 1, 0)),
    ("torchrun in srun", SRUN | TORCHRUN, Place(2, 4, 0)),
    ("sbatch", {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4"}, None),
    ("nothing", {"HOME": "/root", "RANK": "7"}, None),
]


@pytest.mark.parametrize(("recorded", "place"), [each[1:] for each in RECORDED], ids=[e[0] for e in RECORDED])
def test_conformance(recorded: Mapping[str, str], place: Place | None) -> None:
    environment = launcher_of(1, None, recorded)
    assert place == (environment and place_of(environment))


MALFORMED: list[tuple[Mapping[str, str], str]] = [
    (TORCHRUN | {"RANK": "abc"}, r"'RANK': 'abc'.* \(ValueError: .*'abc'\)\. Start the script with torchrun"),
    (TORCHRUN | {"RANK": "-1"}, r"\(Place\(rank=-1, .* is not possible\)"),
    (TORCHRUN | {"RANK": "4"}, r"\(Place\(rank=4, world_size=4, .* is not possible\)"),
    (TORCHRUN | {"WORLD_SIZE": ""}, "'WORLD_SIZE': ''.* \\(ValueError: "),
    (TORCHRUN | {"MASTER_ADDR": ""}, "at :34789 is not possible"),
    (TORCHRUN | {"MASTER_PORT": "x"}, "'MASTER_PORT': 'x'.* \\(ValueError: .*'x'"),
    (BY_HAND | {"LOCAL_RANK": "-1"}, "local_rank=-1.* is not possible"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "KeyError: 'LOCAL_RANK'"),
]


@pytest.mark.parametrize(("variables", "message"), MALFORMED)
def test_malformed_variables(variables: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        _store_of(launcher_of(1, None, {**variables, "TOKEN": "secret"}))  # asks for the place first
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("launcher", "name"), [("srun", "SLURM_STEP_NUM_TASKS"), ("mpirun", "OMPI_COMM_WORLD_SIZE")])
def test_processes_that_would_train_by_themselves(launcher: str, name: str) -> None:
    with pytest.raises(RuntimeError, match=rf"^{launcher} has started 4 processes \({name}\).*\[J873\]"):
        launcher_of(1, None, {name: "4"})
    assert launcher_of(1, None, {name: "1"}) is None
    assert launcher_of(1, None, {name: "4"} | TORCHRUN) is not None
    assert launcher_of(1, own := object(), {name: "4"}) is own


def store_of(variables: Mapping[str, str]) -> dist.Store:
    return _store_of(launcher_of(1, None, variables))


def test_rank_0_serves_the_store_unless_an_agent_does() -> None:
    port = str(random.randrange(25000, 30000))
    variables = BY_HAND | {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    served = store_of(variables)
    served.set("key", "value")
    assert store_of(variables) is served  # another launcher in the same process
    client = store_of(variables | {"RANK": "1"})
    assert client.get("key") == b"value"
    of_agent = variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    jobs = [store_of(of_agent | {"TORCHELASTIC_RUN_ID": job, "RANK": rank}) for job in "ab" for rank in "01"]
    jobs[0].set("agent's key", "value")
    assert [job.check(["agent's key"]) for job in (served, *jobs)] == [False, True, True, False, False]


@pytest.mark.parametrize(
    ("variables", "others"),
    [
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "other"}),
        (BY_HAND, {"WORLD_SIZE": "3"}),
    ],
)
def test_jobs_of_a_launcher(variables: Mapping[str, str], others: Mapping[str, str]) -> None:
    """Ranks of one job have the same job, and each variable that names another one makes another."""

    def job(more: Mapping[str, str]) -> str:
        environment = launcher_of(1, None, {**variables, **more})
        return job_of(environment, place_of(environment).world_size)

    rank = dict.fromkeys(("RANK", "LOCAL_RANK"), "0")
    assert job({}) == job({name: value for name, value in rank.items() if name in variables}) != job(others)
    assert job({}).endswith(f", user {os.getuid()}")
