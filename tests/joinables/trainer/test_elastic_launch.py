"""Ranks that are killed under torchrun, which starts all of them anew: each sample once, as in one process.

What is launched is torchrun's own, with workers that are forked; ``tests/test_scripts.py`` has a script under it.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ending import Ending
from tests.harness import NIGHT, at_night, in_test_all
from tests.joinables.trainer.elastic import STEPS, WORK, Kill, assert_exact

pytestmark = pytest.mark.timeout(400)


def as_worker(work: str, folder: str, kills: tuple[Kill, ...]) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork of torchrun has torchrun's own way
    WORK[work](Path(folder), kills)


def torchrun(rank: int, work: str, folder: str, nodes: int, ranks: int, restarts: int, *kills: Kill) -> str:
    """One of ``nodes`` agents, or of fewer if some are lost, with as many ``ranks``; how its last attempt ended."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    tempfile.tempdir = folder  # what a killed process leaves goes there, too
    # torchrun's store outlives ranks, and has the addresses of those that are gone. The trainer knows that.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = str(int(work == "by hand"))
    # A node is lost when nobody has heard of it for 10 s; a slow machine must not look like that.
    waits = {"store_type": "file", "last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 10}
    config = LaunchConfig(
        min(nodes, 2),
        nodes,
        ranks,
        run_id=f"{nodes} times {ranks}",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{folder}/rendezvous",
        rdzv_configs=waits,
        max_restarts=restarts,
        logs_specs=DefaultLogsSpecs(folder),
        start_method="fork",
        local_addr="localhost",
    )
    try:
        elastic_launch(config, as_worker)(work, folder, kills)
    except ChildFailedError as error:
        return str(error)
    return "done"


ALONE: dict[str, Any] = {"group": False, "limit": 150}  # seconds, for a slow machine
SEEDS = range(10) if NIGHT else range(1)
SOME_WORK = WORK if NIGHT else [*WORK][:1]


def drawn(seed: int, count: int, **where: Any) -> list[Kill]:
    draw = random.Random(seed)
    steps = sorted(draw.sample(range(STEPS - 1), count))
    return [Kill(step, draw.randrange(3), draw.random() < 0.5, **where) for step in steps]


@in_test_all
@pytest.mark.parametrize("work", SOME_WORK)
@pytest.mark.parametrize("seed", SEEDS)
def test_as_many_ranks_go_on(ending: Ending, tmp_path: Path, work: str, seed: int) -> None:
    kills = drawn(seed, 2)
    assert ending.run(torchrun, work, str(tmp_path), 1, 3, 2, *kills, ranks=1, **ALONE) == ["done"], kills
    assert len(list(tmp_path.glob("killed-*"))) == 2
    assert_exact(tmp_path, 3)


@in_test_all
@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("seed", SEEDS)
def test_fewer_ranks_go_on(ending: Ending, tmp_path: Path, work: str, seed: int) -> None:
    """Three ranks have one attempt, and then two another one."""
    kills = drawn(seed, 2)
    (told,) = ending.run(torchrun, work, str(tmp_path), 1, 3, 1, *kills, ranks=1, **ALONE)
    assert told != "done"
    assert ending.run(torchrun, work, str(tmp_path), 1, 2, 0, ranks=1, **ALONE) == ["done"], kills
    assert_exact(tmp_path, 2)


@in_test_all
@pytest.mark.parametrize("work", SOME_WORK)
def test_a_rank_is_killed_before_it_meets_the_others(ending: Ending, tmp_path: Path, work: str) -> None:
    kill = Kill(-1, 1, is_over=False)
    assert ending.run(torchrun, work, str(tmp_path), 1, 3, 1, kill, ranks=1, **ALONE) == ["done"]
    assert_exact(tmp_path, 3)


@at_night  # the others wait 10 s for the machine that is lost
@pytest.mark.parametrize("work", WORK)
def test_a_machine_is_lost(ending: Ending, tmp_path: Path, work: str) -> None:
    """Of three agents with a rank each, one is killed with its rank; the other two go on by themselves."""
    (kill,) = drawn(0, 1, agent=True)
    agents = ending.ends(torchrun, work, str(tmp_path), 3, 1, 3, kill, ranks=3, **ALONE)
    assert sorted(end.code for end in agents) == [-signal.SIGKILL, 0, 0], [end.text for end in agents]
    assert [end.result for end in agents if end.code == 0] == ["done"] * 2
    assert_exact(tmp_path, 2)
