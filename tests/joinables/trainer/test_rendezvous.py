"""Ranks that meet through a store in which others have left their keys."""

from __future__ import annotations

import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from join.collectives.store import local_store
from joinables.trainer.rendezvous import fresh_store


def client(server: dist.TCPStore) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def meet(server: dist.TCPStore, ranks: int, late: int = 0) -> None:
    """All ranks find what rank 0 leaves; the one that is ``late`` comes after all others."""
    told, found = uuid.uuid4().hex, dict[int, str]()

    def one(rank: int) -> None:
        if rank == late:
            time.sleep(0.2)
        ours = fresh_store(client(server), rank, ranks)
        if rank == 0:
            assert not ours.check(["key"])
            ours.set("key", told)
        found[rank] = ours.get("key").decode()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(range(ranks), told)


@pytest.mark.parametrize("late", [0, 1, 2])
def test_one_launch_after_the_other(server: dist.TCPStore, late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for ranks in (3, 3, 1, 2, 3, 4):
        meet(server, ranks, late)


def test_ranks_that_are_gone_had_come_alone(server: dist.TCPStore) -> None:
    """They were killed while rank 0 was still on its way."""
    for rank in (1, 3):
        server.set(f"hello/{rank}", "the word of one that is gone")
    meet(server, 4, late=1)
    meet(server, 4, late=3)


def test_a_word_of_a_stranger_that_is_no_text_is_ignored(server: dist.TCPStore) -> None:
    """A rank that comes later writes over it."""
    client(server).set("hello/1", b"\xff")  # pyright: ignore[reportArgumentType]
    meet(server, 2, late=1)


def test_a_rank_does_not_come(server: dist.TCPStore) -> None:
    store = client(server)
    store.set_timeout(timedelta(seconds=0.1))
    with pytest.raises(dist.DistStoreError, match=r"ranks \[1, 2\] of 3 have not arrived at the launch"):
        fresh_store(store, 0, 3)


def test_a_rank_of_another_job_is_refused(server: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither enters the job nor stops it."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    lead = threading.Thread(target=fresh_store, args=(client(server), 0, 2))
    lead.start()
    client(server).get("job")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs\x1b")
    with pytest.raises(
        RuntimeError, match=r"Rank 1 of a job \(TORCHELASTIC_RUN_ID=theirs.*ID=ours, 2 ranks, user \d+\).*J572"
    ):
        fresh_store(client(server), 1, 2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "ours")
    fresh_store(client(server), 1, 2)
    lead.join(20)
    assert not lead.is_alive()


def test_a_store_of_this_machine_listens_on_loopback_only() -> None:
    store = local_store()
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    at = {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[1].endswith(f":{store.port:04X}")}
    assert at == {"0100007F"}  # 127.0.0.1
