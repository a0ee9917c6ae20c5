"""Random programs of bursts on thread ranks, of which two headers may be under way: they end as they should.

Ranks run out anywhere in the pattern of bursts, announce another burst than the others, leave one out, or raise.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import pytest
import torch
from typing_extensions import override

from join import Burst, Join, JoinError
from join.collectives import ThreadCollective, run_threads
from join.joinable import OnGroup
from tests.shorter import using

SEEDS = 40 * int(os.environ.get("SOAK", "1"))
AT_ONCE = 10  # programs in a test


class Sum(OnGroup, Burst):
    """Sums over all ranks; the leader then tells all that it leads, if it is to."""

    def __init__(self, collective: ThreadCollective, size: int, tells: bool) -> None:
        super().__init__(collective)
        self.collective, self.size, self.tracks_leader = collective, size, tells  # type: ignore[misc]
        self.total, self.leaders = 0, list[int]()

    @property
    @override
    def join_name(self) -> str:
        return f"sum {self.size}"

    @override
    def attach(self, join: Join) -> None:
        self.channel = join.channel

    def __call__(self) -> None:
        self.channel.announce(self)
        self.run(1)

    @override
    def main_hook(self) -> None:
        self.run(0)

    def run(self, number: int) -> None:
        numbers = torch.full((self.size,), number)  # of another size in each burst: those of two never fit together
        work = self.collective.all_reduce(numbers)
        if self.tracks_leader:
            leader = self.channel.headers.leader_for(self)
            told = torch.tensor([self.collective.rank])
            self.collective.broadcast(told, leader).wait()
            self.leaders.append(int(told))
        work.wait()
        self.total += int(numbers[0])


@dataclass(frozen=True)
class Program:
    """What ranks announce, as indices of bursts; of which rank ``fails`` raises at a step, if it does."""

    tells: tuple[bool, ...]
    scripts: tuple[tuple[int, ...], ...]
    diverges: bool
    fails: int
    at: int | None


def program_of(seed: int) -> Program:
    draw = random.Random(seed)
    ranks, kinds = draw.randint(2, 4), draw.randint(1, 4)
    pattern = [draw.randrange(kinds) for _ in range(draw.randint(1, 5))]
    lengths = [draw.randint(0, 25) if draw.random() < 0.5 else draw.randint(0, 4) * len(pattern) for _ in range(ranks)]
    scripts = [(pattern * 25)[:length] for length in lengths]
    what, other = draw.choice(["nothing", "nothing", "diverges", "raises", "both"]), draw.randrange(ranks)
    diverges = what in ("diverges", "both") and kinds > 1 and bool(scripts[other])
    if diverges:
        at = draw.randrange(len(scripts[other]))
        if draw.random() < 0.5:
            scripts[other][at] = (scripts[other][at] + 1) % kinds
        else:
            del scripts[other][at]
    fails = draw.randrange(ranks)
    raises = what in ("raises", "both") and bool(scripts[fails])
    at = draw.randrange(len(scripts[fails])) if raises else None
    tells = tuple(draw.random() < 0.4 for _ in range(kinds))
    return Program(tells, tuple(map(tuple, scripts)), diverges, fails, at)


def run(program: Program, seed: int) -> list[tuple[str, list[int], list[list[int]]]]:
    def work(collective: ThreadCollective) -> tuple[str, list[int], list[list[int]]]:
        draw, rank = random.Random(seed + collective.rank), collective.rank
        bursts = [Sum(collective, index + 1, tells) for index, tells in enumerate(program.tells)]
        result = "fine"
        try:
            with Join(bursts):
                for step, index in enumerate(program.scripts[rank]):
                    if (rank, step) == (program.fails, program.at):
                        raise KeyError("own")
                    if draw.random() < 0.1:
                        time.sleep(0.003)
                    bursts[index]()
        except (JoinError, KeyError) as error:
            result = type(error).__name__
        return result, [burst.total for burst in bursts], [burst.leaders for burst in bursts]

    with using(look=0.02, cause=1.0):
        return run_threads(len(program.scripts), work, timeout=20.0)


def check(seed: int) -> None:
    program = program_of(seed)
    outcomes = run(program, seed)
    results, told = [result for result, _, _ in outcomes], f"seed {seed}: {program}: {outcomes}"
    longest = max(program.scripts, key=len)
    agrees = all(script == longest[: len(script)] for script in program.scripts)
    if program.at is None and agrees:
        expected = [sum(script.count(index) for script in program.scripts) for index in range(len(program.tells))]
        for result, totals, leaders in outcomes:
            assert (result, totals, leaders) == ("fine", expected, outcomes[0][2]), told
        return
    assert "fine" not in results, told
    assert set(results) <= {"ProtocolError", "PeerError", "KeyError"}, told
    if agrees:  # then the rank that raises does so itself
        assert [rank for rank, result in enumerate(results) if result == "KeyError"] == [program.fails], told


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_programs_end_as_they_should(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        check(seed)
