"""A rank on a host of its own that enters a block, and how that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from join import Join, JoinError
from join.collectives import TorchCollective, collective_of
from tests.two_hosts.hosts import HOSTS, LINK, PORT, address

GLOO = timedelta(seconds=60)


def cut_the_link(companion: Any) -> Any:
    """Cut the link before the ranks connect for headers."""

    def cut(self: TorchCollective) -> TorchCollective:
        subprocess.run(["ip", "link", "set", LINK, "down"], check=True)
        return companion(self)

    return cut


def main() -> None:
    rank, case = int(sys.argv[1]), sys.argv[2]
    store = dist.TCPStore(address(0, ipv6=case == "ipv6"), PORT, HOSTS, rank == 0, timeout=GLOO)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=HOSTS, timeout=GLOO)
    group: Any = dist.new_group(backend="cuda:gloo" if case.startswith("loopback") else "gloo")
    if case.startswith("loopback"):  # as on hosts whose names have such an address
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    elif case.startswith("cut") and rank == 1:
        TorchCollective.companion = cut_the_link(TorchCollective.companion)
    timeout = float(case.split()[-1]) if "timeout" in case else None
    text, began = "fine", time.monotonic()
    try:
        with Join([], process_group=group, timeout=timeout) as join:
            text = f"{len(list(join.iterate(range(rank))))} steps on a {type(collective_of(group).line()).__name__}"
    except JoinError as error:
        text = f"{type(error).__name__}: {error}"
    print("SAID", json.dumps([text, time.monotonic() - began]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
