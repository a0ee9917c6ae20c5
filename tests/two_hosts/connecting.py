"""A rank on a host of its own: where it connects to for headers, and what carries them in the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from join import Join, JoinError
from join.collectives import collective_of, handshake
from join.collectives.handshake import Place
from join.collectives.timeouts import TIMEOUTS
from tests.two_hosts.hosts import HOSTS, LINK, PORT, address

NOWHERE: Place = ("10.77.0.77", 9)
"""On the link, and nobody answers there."""


def enter_while_the_link_is_cut(rank: int, meeting: Any) -> str:
    """Enter a block, and cut the link while rank 1 connects; the error."""
    TIMEOUTS.connect = 2.0
    call = meeting._call

    def cut_and_call(self: Any, distance: int, place: Place) -> Any:
        subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
        return call(self, distance, place)

    if rank == 1:
        meeting._call = cut_and_call
    try:
        with Join([], process_group=None, timeout=3):
            return "entered"
    except JoinError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    rank, case = int(sys.argv[1]), sys.argv[2]
    host = address(0, ipv6=case == "ipv6")
    if case == "route":  # gloo itself finds the link by the host's name, which both have
        os.environ["MASTER_ADDR"] = "localhost"  # is not asked, since the store has another host
    meeting: Any = handshake._Meeting
    call, called = meeting._call, list[Place]()
    meeting._call = lambda self, distance, place: (called.append(place), call(self, distance, place))[1]
    if case == "drops":
        TIMEOUTS.connect = 1.0
        meeting._places_of = lambda self, distance: [NOWHERE]
    store = dist.TCPStore(host, PORT, HOSTS, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=HOSTS, timeout=timedelta(seconds=60))
    if case == "route":
        del os.environ["GLOO_SOCKET_IFNAME"]
    if case == "cut":
        print("SAID", json.dumps(enter_while_the_link_is_cut(rank, meeting)), flush=True)
        os._exit(0)
    line = collective_of(None).line()
    work = line.sum(1, 5)
    work.wait()
    print("SAID", json.dumps([type(line).__name__, work.total(), [place[0] for place in called]]), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
