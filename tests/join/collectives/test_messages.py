"""The line between machines: in how many hops its messages come through, and what goes wrong with connections."""

from __future__ import annotations

import gc
import math
import os
import pickle
import signal
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from join.collectives import Collective, collective_of, run_threads
from join.collectives import messages as module
from join.collectives.broken import BrokenCollective
from join.collectives.messages import Mesh, MessageLine, connect, rounds_of
from tests.ending import Ending
from tests.meeting import tell, wait_for
from tests.pool import Pool


def meshed(collective: Collective) -> Mesh:
    mesh = connect(collective, 30.0)
    assert mesh is not None
    return mesh


# -- hops --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [*range(1, 70), 127, 128, 129, 1000, 1023, 1024, 10_000])
def test_hops_are_the_logarithm_of_the_ranks(ranks: int) -> None:
    """Each rank does the same, so the windows of all have the same length: of rank 0, it ends up with all ranks."""
    rounds, window, hops = rounds_of(ranks), 1, 0
    assert len({distance for distance, _ in rounds}) == len(rounds) <= 2 * max(ranks - 1, 0).bit_length()
    for distance, is_window in rounds:
        assert distance == window < ranks  # what arrives ends right before what this rank has
        window += window if is_window else 1
        hops += is_window  # the others were sent at once
    assert window == ranks
    assert hops == int(math.log2(ranks))


def count_messages(collective: Collective) -> list[tuple[int, int]]:
    mesh, sent = meshed(collective), list[tuple[int, int]]()
    send = mesh.send

    def noted(line: int, count: int, distance: int, data: bytes) -> None:
        sent.append((distance, len(data)))
        send(line, count, distance, data)

    with mock.patch.object(mesh, "send", noted):
        work = MessageLine(mesh, 0).sum(1, 16)
        work.wait()
        assert work.total() == collective.world_size
    collective.barrier()
    mesh.close()
    return sent


@pytest.mark.parametrize("ranks", [2, 3, 7, 16, 64])
def test_messages_are_small_and_few(ranks: int) -> None:
    for sent in run_threads(ranks, count_messages, timeout=60):
        assert sorted(distance for distance, _ in sent) == [distance for distance, _ in rounds_of(ranks)]
        assert all(size < 32 for _, size in sent)


def large(collective: Collective) -> None:
    mesh = meshed(collective)
    rows = [bytes([rank]) * 3_000_000 for rank in range(collective.world_size)]  # more than a connection holds
    for _ in range(3):
        work = MessageLine(mesh, 0).gather(rows[collective.rank])
        work.wait()
        assert work.rows() == rows
    collective.barrier()
    mesh.close()


def test_nobody_is_held_up_by_large_messages() -> None:
    run_threads(5, large, timeout=60)


def lines_in_another_order(collective: Collective) -> None:
    mesh = meshed(collective)
    numbers = (0, 1) if collective.rank % 2 else (1, 0)
    works = {number: MessageLine(mesh, number).sum(number + 1, 16) for number in numbers}
    for number, work in works.items():
        work.wait()
        assert work.total() == (number + 1) * collective.world_size
    collective.barrier()
    mesh.close()


def test_lines_do_not_wait_for_each_other() -> None:
    run_threads(6, lines_in_another_order, timeout=30)


# -- ranks that are gone -----------------------------------------------------------------------------------------------


def killed(rank: int) -> list[tuple[int, ...] | str]:
    collective: Any = collective_of(None)
    line = collective.line()
    line.sum(1, 5).wait()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found: list[tuple[int, ...] | str] = []
    for _ in range(2):  # whoever comes later learns it, too
        try:
            line.sum(1, 5).wait(timedelta(seconds=2))
        except BrokenCollective as error:
            found.append(error.ranks)
        except RuntimeError as error:
            found.append(str(error).partition(". ")[0])
    if rank == 0:
        tell()
    wait_for([0])
    return found


def test_a_killed_rank_is_missed_by_those_it_sends_to(ending: Ending) -> None:
    """The others learn of it by the note of one of these."""
    ends = ending.ends(killed, ranks=4, over_group=True)
    late = "Waiting for all ranks timed out after 2 s"
    assert [end.result for end in ends] == [[late] * 2, None, [(1,)] * 2, [(1,)] * 2], ends[0].text


def gives_and_ends(rank: int) -> int:
    line = collective_of(None).line()
    work = line.sum(1, 5)
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    work.wait(timedelta(seconds=5))
    return work.total()


def test_what_a_rank_has_given_counts_when_it_has_ended(ending: Ending) -> None:
    first, second = ending.ends(gives_and_ends, ranks=2, over_group=True)
    assert (first.result, second.code) == (2, 0), first.text


def impatient(rank: int) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.4))
    line = collective_of(group).line()
    if rank == 0:
        with pytest.raises(BrokenCollective, match=r"timed out after 0.4 s: some rank did not arrive"):
            line.sum(1, 5).wait()
        work = line.sum(1, 5)
        with pytest.raises(BrokenCollective, match=r"timed out after 0.4 s: some rank did not arrive"):
            while not work.is_completed():
                with suppress(RuntimeError):  # as whoever looks at notes meanwhile
                    work.wait(timedelta(seconds=0.1))
            work.total()
    dist.barrier()


def test_the_timeout_is_that_of_the_group(pool: Pool) -> None:
    pool.run(impatient, ranks=2, over_group=True)


def put_together(collective: Collective) -> str:
    """Ranks that use the line for different things; the thread goes on."""
    mesh = meshed(collective)
    line = MessageLine(mesh, 0)
    work: Any = line.gather(b"1") if collective.rank else line.sum(1, 5)
    with pytest.raises(BrokenCollective) as caught:
        work.wait()
    other = MessageLine(mesh, 1).sum(1, 5)
    other.wait()
    assert other.total() == 2
    collective.barrier()
    mesh.close()
    return str(caught.value)


def test_numbers_that_cannot_be_put_together() -> None:
    for text in run_threads(2, put_together, timeout=30):
        assert text.startswith("the messages of the ranks cannot be combined: TypeError(")


def sends(collective: Collective, message: bytes) -> str:
    """What rank 1 is told when rank 0 sends it these bytes."""
    mesh, text = meshed(collective), ""
    if collective.rank == 0:
        with mesh.lock:
            mesh._outward[1].unsent += message
            mesh._flush(mesh._outward[1])
    else:
        with pytest.raises(BrokenCollective) as caught:
            MessageLine(mesh, 0).sum(1, 5).wait()
        text = str(caught.value)
    collective.barrier()
    mesh.close()
    return text


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (module._FRAME.pack(0, 1, module._LARGEST + 1), "the process of rank 0 has ended, or has left the group"),
        (
            module._FRAME.pack(0, 1, 5) + pickle.dumps(7),
            "the messages of the ranks cannot be combined: JSONDecodeError",
        ),
        (module._FRAME.pack(0, 1, 0), "the messages of the ranks cannot be combined: JSONDecodeError"),
    ],
)
def test_messages_of_another_form_are_not_read(message: bytes, told: str) -> None:
    assert told in run_threads(2, partial(sends, message=message), timeout=30)[1]


# -- connections -------------------------------------------------------------------------------------------------------


def freed(rank: int) -> None:
    collective_of(None).line()  # whatever is opened once
    time.sleep(0.2)
    before, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    group = dist.new_group()
    collective_of(group).line().sum(1, 5).wait()
    dist.barrier()
    assert threading.active_count() == threads + 1
    dist.destroy_process_group(group)  # pyright: ignore[reportArgumentType]
    del group
    gc.collect()
    deadline = time.monotonic() + 10  # gloo closes its connections in a thread
    while len(os.listdir("/proc/self/fd")) > before or threading.active_count() > threads:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_connections_end_with_the_group(pool: Pool) -> None:
    pool.run(freed, ranks=2, over_group=True)
