"""Benchmark of a header, of a shadowed step and of leaving a block, by number of ranks and by model size.

**Ranks.** A ``Joinable`` without collectives of its own announces as fast as it can. So a block consists of headers
only, and each header is read before the next one is sent. First all ranks announce; then rank 0 announces alone, and
all other ranks have joined. Ranks are gloo processes, or threads. If there are more processes than processors, the
processes wait for processors and not for each other. Threads exchange only Python objects, and show the cost of the
protocol itself.

    header      wall time of a header while all are active
    CPU         processor time of a header, a rank
    shadowed    wall time of a header while all but rank 0 have joined
    bytes       size of a header, from ``join.report``; must not grow with the ranks

**Model size.** Two processes train a DDP module of four linear layers with SGD and momentum; then rank 0 trains alone
and rank 1, without a single batch, shadows it.

    even step   wall time of a step while both train
    step        wall time of a step of rank 0 while rank 1 has joined
    active CPU  processor time of such a step on rank 0
    joined CPU  processor time of its shadow on rank 1, with a share of what leaving the block takes there
    idle        the part of that step which rank 1 spends waiting for the next header
    exit        wall time of leaving the block on rank 0: its parameters, gradients and optimizer state are copied

All times are medians over ``--repeats`` blocks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from common import run_processes, save, table
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils import _pytree as pytree

from join import Join, Joinable, JoinHook
from join.collectives import ThreadCollective, run_threads

PROCESSES = [2, 4, 8]
THREADS = [2, 4, 8, 16, 32, 64]
PARAMETERS = [10**4, 10**5, 10**6, 10**7]
WARM_UP = 5

Measurement = dict[str, float]

# -- ranks ------------------------------------------------------------------------------------------------------------


class Bare(Joinable):
    """A joinable without collectives of its own."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self._group = group

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return JoinHook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return self._group


class Announcer(Bare):
    """A joinable whose bursts are empty, so only its headers take time."""

    def announce(self, headers: int) -> float:
        """Announce a number of bursts; return the seconds of each."""
        started = time.perf_counter()
        for _ in range(headers):
            Join.notify_join_context(self)
        return (time.perf_counter() - started) / headers


def time_headers(headers: int, repeats: int, group: Any = None) -> list[Measurement]:
    """Run a number of blocks of headers on each rank, even blocks and uneven blocks."""
    return [one_round(headers, group) for _ in range(repeats)]


def one_round(headers: int, group: Any) -> Measurement:
    announcer = Announcer(group)
    with Join([announcer]) as even:
        announcer.announce(WARM_UP)
        cpu = time.process_time()
        wall = announcer.announce(headers)
        cpu = (time.process_time() - cpu) / headers
    with Join([announcer]) as uneven:
        shadowed = 0.0
        if uneven.collective.rank == 0:
            announcer.announce(WARM_UP)
            shadowed = announcer.announce(headers)
    mine = even.report.ranks[even.collective.rank]
    return {"wall": wall, "cpu": cpu, "shadowed": shadowed, "bytes": mine.header_bytes / mine.headers}


def over_processes(world_size: int, headers: int, repeats: int) -> Measurement:
    ranks = run_processes(world_size, time_headers, headers, repeats)
    return {**medians(ranks[0]), "cpu": statistics.mean(medians(rounds)["cpu"] for rounds in ranks)}


def over_threads(world_size: int, headers: int, repeats: int) -> Measurement:
    def rank(collective: ThreadCollective) -> list[Measurement]:
        torch.set_num_threads(1)
        return time_headers(headers, repeats, collective)

    measured = medians(run_threads(world_size, rank)[0])
    measured["cpu"] /= world_size  # it is the time of the process, and so of all ranks
    return measured


def measure_ranks(kind: str, sizes: list[int], measure: Callable[[int], Measurement]) -> list[dict[str, Any]]:
    return [{"ranks": f"{size} {kind}", "world_size": size, **measure(size)} for size in sizes]


def rank_row(entry: dict[str, Any]) -> list[str]:
    times = [entry[name] for name in ("wall", "cpu", "shadowed")]
    return [entry["ranks"], *(f"{seconds * 1e6:.0f} us" for seconds in times), f"{entry['bytes']:.0f} B"]


# -- model size -------------------------------------------------------------------------------------------------------


def time_model(parameters: int, steps: int, repeats: int) -> list[Measurement]:
    """Run even and uneven blocks on each rank, with a model of about the given number of parameters."""
    torch.manual_seed(0)
    width = round((parameters / 4) ** 0.5)
    model = DDP(nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(4)]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    inputs = torch.randn(16, width)

    def train(count: int) -> tuple[float, float]:
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs).mean().backward()
            optimizer.step()
        return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count

    results: list[Measurement] = []
    with Join([model, optimizer]):
        train(WARM_UP)
    for _ in range(repeats):
        with Join([model, optimizer]):
            train(2)
            even, _ = train(steps)
        with Join([model, optimizer]) as join:
            joined = join.collective.rank == 1
            wall, cpu = (0.0, 0.0) if joined else train(steps)
            left, left_cpu = time.perf_counter(), time.process_time()
        exit_wall, exit_cpu = time.perf_counter() - left, time.process_time() - left_cpu
        mine = join.report.ranks[join.collective.rank]
        state = [model.state_dict(), [p.grad for p in model.parameters()], optimizer.state_dict()]
        results.append(
            {
                "even": even,
                "wall": wall,
                "cpu": exit_cpu / steps if joined else cpu,
                "idle": mine.idle / steps,
                "exit": exit_wall,
                "megabytes": sum(each.nbytes for each in pytree.tree_leaves(state) if torch.is_tensor(each)) / 1e6,
            }
        )
    return results


def time_models(steps: int, repeats: int) -> list[list[Measurement]]:
    return [time_model(parameters, steps, repeats) for parameters in PARAMETERS]


def size_entry(parameters: int, active: Measurement, joined: Measurement) -> dict[str, Any]:
    return {
        "parameters": parameters,
        "even": active["even"],
        "wall": active["wall"],
        "active_cpu": active["cpu"],
        "joined_cpu": joined["cpu"],
        "idle": joined["idle"],
        "exit": active["exit"],
        "megabytes": active["megabytes"],
    }


def size_row(entry: dict[str, Any]) -> list[str]:
    times = [entry[name] for name in ("even", "wall", "active_cpu", "joined_cpu", "idle", "exit")]
    return [
        f"{entry['parameters']:,}",
        *(f"{seconds * 1e3:.2f} ms" for seconds in times),
        f"{entry['megabytes']:.2f} MB",
        f"{entry['exit'] / entry['megabytes'] * 1e3:.2f} ms",
    ]


# -- reporting --------------------------------------------------------------------------------------------------------


def medians(rounds: list[Measurement]) -> Measurement:
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


RANK_HEAD = ["", "header", "CPU", "shadowed", "bytes"]
SIZE_HEAD = ["parameters", "even step", "step", "active CPU", "joined CPU", "idle", "exit", "state", "exit per MB"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps in a block; ten times as many headers")
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each kind")
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    headers, repeats = 10 * options.steps, options.repeats
    blocks = {"headers": headers, "repeats": repeats}

    processes = measure_ranks("processes", PROCESSES, partial(over_processes, **blocks))
    threads = measure_ranks("threads", THREADS, partial(over_threads, **blocks))
    print(f"Headers: {repeats} blocks of {headers}, torch {torch.__version__}\n")
    print(table(RANK_HEAD, [rank_row(entry) for entry in processes + threads]))

    by_rank = run_processes(2, time_models, options.steps, repeats)
    active, joined = (map(medians, models) for models in by_rank)
    sizes = [size_entry(*each) for each in zip(PARAMETERS, active, joined, strict=True)]
    print(f"\nModel size: 2 gloo processes, {repeats} blocks of {options.steps} steps\n")
    print(table(SIZE_HEAD, [size_row(entry) for entry in sizes]))
    save(options.json, steps=options.steps, repeats=repeats, processes=processes, threads=threads, sizes=sizes)


if __name__ == "__main__":
    main()
