"""Benchmark of ``Join`` on a link on which a message takes 10 ms from one machine to the other.

Gloo processes train a model in several ways, each process in a network namespace of its own. The link between the
namespaces delays each packet: it is a TUN device on each side, and a process that carries packets from one device to
another. All processes run on one kernel and would share memory. The benchmark disables shared memory, so headers go
over the network, as between machines. It needs Linux, iproute2 and root.

The ways take turns of a few steps, as in ``overhead.py``. Each round draws a new order. A turn opens the way's context,
and does not measure the first steps in it. For each step of a turn, from the first to the last, the benchmark takes the
median over the turns. The table has the mean of these medians: costs that occur now and then do not count, and costs
that occur every few steps do. Plain DDP is measured twice; the difference of the two is noise.

    step        wall time of a step, mean of the ranks
    ratio       wall time of a step, divided by the wall time of plain DDP
    next...     time added to each part of a step, in milliseconds; in "next", join.iterate yields a batch
    added trips time added to a step, in one-way times of the link; an awaited all-reduce takes two or more
    block       wall time of a turn, divided by that of plain DDP: a block of a few steps with its entry, its first
                steps, in which headers are awaited, and its exit, as reinforcement learning opens one for each update
    block trips time that this adds, in one-way times of the link
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import multiprocessing
import os
import pickle
import secrets
import select
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from common import save, table
from overhead import WAYS as USUAL_WAYS
from overhead import Parts, Training, Way, gan, of_turns, opened, our_join, sharded, supervised, trainings_of, turns
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

_HEAD = 10  # bytes that the device puts before a packet
_DESTINATION = _HEAD + 19  # the last byte of the address that the packet is for
LIMIT_SECONDS = 900.0

# -- the link ---------------------------------------------------------------------------------------------------------

TUN, PORT = "tun0", 29500  # in a network namespace that was just made, every port is free
_DEVICE = "/dev/net/tun"
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_CHECKSUMS_AND_SEGMENTS = 0x1 | 0x2 | 0x4  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_MOST_BYTES = 1 << 17


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise SystemExit(f"there is no link to measure over: ip {' '.join(words)}: {done.stderr.strip()}")


def check_possible() -> None:
    """End the program where no link can be made."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise SystemExit("there is no link to measure over: making one takes iproute2 and root")
    if not os.path.exists(_DEVICE):
        try:
            os.makedirs(os.path.dirname(_DEVICE), exist_ok=True)
            os.mknod(_DEVICE, 0o600 | stat.S_IFCHR, os.makedev(10, 200))
        except OSError as error:
            raise SystemExit(f"there is no link to measure over: {error}") from None


@contextlib.contextmanager
def far_apart(hosts: int, seconds: float) -> Generator[list[str]]:
    """Yield the names of network namespaces between which each packet takes so long."""
    token = secrets.token_hex(4)
    names = [f"join-{token}-{rank}" for rank in range(hosts)]
    here, there = multiprocessing.Pipe(duplex=False)
    carrier = multiprocessing.get_context("fork").Process(target=carry, args=(names, seconds, there), daemon=True)
    try:
        for name in names:
            ip("netns", "add", name)
        carrier.start()
        problem = here.recv() if here.poll(20) else "the TUN devices do not come up"
        if problem:
            raise SystemExit(f"there is no link to measure over: {problem}")
        for rank, name in enumerate(names):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "addr", "add", f"{address(rank)}/24", "dev", TUN)
            ip("-n", name, "link", "set", TUN, "up")
        yield names
    finally:
        if carrier.pid is not None:
            carrier.kill()
            carrier.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], timeout=20, stderr=subprocess.DEVNULL)


def address(rank: int) -> str:
    return f"10.78.0.{rank + 1}"


def carry(names: list[str], seconds: float, ready: Connection) -> None:
    """Carry packets between the namespaces, without end, each ``seconds`` after its arrival."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a packet that is due does not wait for the ranks
    try:
        devices = [open_tun(name) for name in names]
    except OSError as error:
        ready.send(str(error))
        return
    ready.send("")
    underway: deque[tuple[float, int, bytes]] = deque()  # in the order in which they are due
    while True:
        patience = max(underway[0][0] - time.monotonic(), 0.0) if underway else None
        for device in select.select(devices, [], [], patience)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, _MOST_BYTES)
                    # Others are of no rank: IPv6 looks for neighbours.
                    if packet[_HEAD] >> 4 == 4 and packet[_DESTINATION] <= len(devices):
                        other = devices[packet[_DESTINATION] - 1]
                        underway.append((time.monotonic() + seconds, other, packet))
        while underway and underway[0][0] <= time.monotonic():
            _, to, packet = underway.popleft()
            with contextlib.suppress(OSError):  # a device that is not up yet
                os.write(to, packet)


def open_tun(name: str) -> int:
    """Return a new TUN device in a namespace.

    The device passes TCP segments in pieces of up to 64 KiB, so few of them have to be carried; its MTU is unchanged.
    """
    enter(name)
    device = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", TUN.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS_AND_SEGMENTS)
    return device


def enter(name: str) -> None:
    """Move this thread to a network namespace."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


# -- what is trained --------------------------------------------------------------------------------------------------


def adam(ddp: DDP) -> torch.optim.Optimizer:
    return torch.optim.Adam(ddp.parameters())


def linear() -> nn.Module:
    return nn.Linear(256, 256)


def mlp(optimizer_of: Callable[[DDP], torch.optim.Optimizer] = adam) -> Training:
    return supervised(
        nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear()), torch.randn(64, 256), optimizer_of
    )


def with_batch_norm(optimizer_of: Callable[[DDP], torch.optim.Optimizer] = adam) -> Training:
    layers = [linear(), nn.BatchNorm1d(256), nn.ReLU(), linear(), nn.BatchNorm1d(256), nn.ReLU(), linear()]
    return supervised(nn.Sequential(*layers), torch.randn(64, 256), optimizer_of)


WAYS: dict[str, Way] = {**USUAL_WAYS, "Join, timeout=60": partial(our_join, timeout=60)}
CASES: dict[str, Callable[[], Training]] = {
    "MLP": mlp,
    "MLP with BatchNorm": with_batch_norm,
    "MLP with ZeRO": partial(mlp, sharded),
    "BatchNorm with ZeRO": partial(with_batch_norm, sharded),
    "GAN": gan,
    "GAN with BatchNorm": partial(gan, norms=True),
}
GANS = ("GAN", "GAN with BatchNorm")
NOT_MEASURED = {"torch's Join": GANS, "Join, weighted": GANS, "join.iterate, weighted": GANS}
"""The models of which a way is not measured: torch's ``Join`` hangs, and losses of a GAN have no weights."""
PARTS = ["next", "zero_grad", "forward", "backward", "step"]
BLOCK = "block"
UPDATE = ["zero_grad", "forward", "forward", "backward", "step"]
"""Parts of each of the two updates of a GAN."""

# -- measuring, on a rank ---------------------------------------------------------------------------------------------


Measured: TypeAlias = dict[str, list[float]]
"""Seconds of each part of each step, turn by turn."""


def run_rank(rank: int, options: argparse.Namespace) -> dict[str, dict[str, Measured]]:
    torch.set_num_threads(1)
    store = dist.TCPStore(address(0), PORT, options.hosts, rank == 0)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.hosts, timeout=limit)
    found = {case: measure(case, options) for case in options.only or CASES}
    dist.barrier()
    return found


def measure(case: str, options: argparse.Namespace) -> dict[str, Measured]:
    wanted = ("plain", "plain, again", *(options.way or WAYS))
    names = [name for name in WAYS if name in wanted and case not in NOT_MEASURED.get(name, ())]
    results: dict[str, Measured] = {name: {part: [] for part in [*PARTS, BLOCK]} for name in names}
    with trainings_of(CASES[case], names) as trainings:
        for name in turns(names, options.rounds, seed=0):
            began = time.perf_counter()
            with opened(trainings[name], WAYS[name], options.steps) as parts:
                for _ in range(options.steps):
                    time_step(parts, ["next", *UPDATE, *UPDATE] if case.startswith("GAN") else PARTS, results[name])
            results[name][BLOCK].append(time.perf_counter() - began)
    return results


def time_step(parts: Parts, names: list[str], measured: Measured) -> None:
    took = dict.fromkeys(PARTS, 0.0)
    for name, part in zip(names, parts, strict=True):
        began = time.perf_counter()
        part()
        took[name] += time.perf_counter() - began
    for name, seconds in took.items():
        measured[name].append(seconds)


# -- reporting --------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> list[dict[str, dict[str, Measured]]]:
    """Return the measurements of each rank."""
    with far_apart(options.hosts, options.milliseconds / 1e3) as names, tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"rank-{rank}") for rank in range(options.hosts)]
        environ = {**os.environ, "GLOO_SOCKET_IFNAME": TUN, "JOIN_SHARED_MEMORY": "0", "OMP_NUM_THREADS": "1"}
        # These addresses have no names: limit the look-up of names, and hide the warnings about it.
        environ |= {"RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        commands = [
            ["ip", "netns", "exec", name, sys.executable, *sys.argv, "--rank", str(rank), str(files[rank])]
            for rank, name in enumerate(names)
        ]
        ranks = [subprocess.Popen(command, env=environ) for command in commands]
        try:
            deadline = time.monotonic() + LIMIT_SECONDS
            while any(rank.poll() is None for rank in ranks):
                if any(rank.poll() for rank in ranks) or time.monotonic() > deadline:
                    raise RuntimeError("a rank has failed, or takes too long")
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [pickle.loads(file.read_bytes()) for file in files]


def typical(ranks: list[Measured], parts: list[str], steps: int) -> float:
    """Seconds that these parts take together in a typical step."""
    by_rank = [[sum(times) for times in zip(*(rank[part] for part in parts), strict=True)] for rank in ranks]
    return of_turns(by_rank, steps)


def summarise(case: str, ranks: list[dict[str, Measured]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry a way."""
    entries: list[dict[str, Any]] = []
    for name in ranks[0]:
        mine, plain = ([rank[way] for rank in ranks] for way in (name, "plain"))
        step, base = (typical(each, PARTS, options.steps) for each in (mine, plain))
        block, base_block = (of_turns([rank[BLOCK] for rank in each], 1) for each in (mine, plain))
        added = {part: typical(mine, [part], options.steps) - typical(plain, [part], options.steps) for part in PARTS}
        entries.append(
            {
                "model": case,
                "way": name,
                "step_ms": step * 1e3,
                "ratio": step / base,
                "added_ms": {part: seconds * 1e3 for part, seconds in added.items()},
                "added_trips": (step - base) * 1e3 / options.milliseconds if options.milliseconds else None,
                "block_ratio": block / base_block,
                "block_trips": (block - base_block) * 1e3 / options.milliseconds if options.milliseconds else None,
            }
        )
    return entries


def row(entry: dict[str, Any]) -> list[str]:
    trips, block_trips = (
        "" if entry[name] is None else f"{entry[name]:+.2f}" for name in ("added_trips", "block_trips")
    )
    return [
        f"{entry['model']}: {entry['way']}",
        f"{entry['step_ms']:.1f} ms",
        f"{entry['ratio']:.3f}",
        *(f"{entry['added_ms'][part]:+.1f}" for part in PARTS),
        trips,
        f"{entry['block_ratio']:.3f}",
        block_trips,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=10.0, help="that a packet takes one way")
    parser.add_argument("--hosts", type=int, default=2, help="number of machines, each with one rank")
    # A multiple of 4, so that a window of lookahead=4 begins in them as often as elsewhere.
    parser.add_argument("--steps", type=int, default=8, help="measured steps in a turn")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each way")
    parser.add_argument("--only", choices=list(CASES), action="append", help="this model only; may be given repeatedly")
    parser.add_argument("--way", choices=list(WAYS), action="append", help="this way, beside plain DDP; likewise")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank, file = options.rank
        Path(file).write_bytes(pickle.dumps(run_rank(int(rank), options)))
        return
    check_possible()
    ranks = run(options)
    entries = [entry for case in ranks[0] for entry in summarise(case, [rank[case] for rank in ranks], options)]
    link, turns_of = f"{options.hosts} hosts, {options.milliseconds:g} ms one way", f"{options.rounds} rounds"
    print(f"{link}, {turns_of} of {options.steps} steps\n")
    head = ["", "step", "ratio", *PARTS, "added trips", BLOCK, "block trips"]
    print(table(head, [row(entry) for entry in entries]))
    save(options.json, milliseconds=options.milliseconds, steps=options.steps, rounds=options.rounds, results=entries)


if __name__ == "__main__":
    main()
