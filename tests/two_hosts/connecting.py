"""A rank on a host of its own: where it connects to for headers, and what carries them in the end."""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from join.collectives import collective_of, handshake
from join.collectives.handshake import Place
from join.collectives.timeouts import TIMEOUTS
from tests.two_hosts.hosts import HOSTS, PORT, address

NOWHERE: Place = ("10.77.0.77", 9)
"""On the link, and nobody answers there."""


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
    line = collective_of(None).line()
    work = line.sum(1, 5)
    work.wait()
    print("SAID", json.dumps([type(line).__name__, work.total(), [place[0] for place in called]]), flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
