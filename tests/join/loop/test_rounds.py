"""Roll calls, with thread ranks: what they say of each step is what one process knows, for any batches and weights."""

from __future__ import annotations

import random
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from join import Join
from join.collectives import ThreadCollective, run_threads
from join.rounds import Options, bits_of

WEIGHTS = {"whole": [0, 1, 7, 2**39], "large": [1, 2**40, 2**60], "fractions": [0, 0.1, 0.3, 1e-300, 1e17, 3]}


def expected(loaders: Sequence[Sequence[float]], until: str, window: int) -> list[tuple[Any, ...]]:
    """Return of each step the ranks that have a batch, the lowest of them, and the weights of step and window."""
    steps = min(map(len, loaders)) if until == "first" else max(map(len, loaders))
    held = [{rank: loader[step] for rank, loader in enumerate(loaders) if step < len(loader)} for step in range(steps)]
    sums = [sum(map(Fraction, step.values())) for step in held]
    return [
        (len(step), min(step), float(sums[at]), float(sum(sums[at // window * window :][:window])))
        for at, step in enumerate(held)
    ]


@pytest.mark.parametrize("kind", ["none", *WEIGHTS])
def test_what_is_known_of_each_step(kind: str) -> None:
    draws = random.Random(kind)

    def run(collective: ThreadCollective) -> list[list[tuple[Any, ...]]]:
        found = list[list[tuple[Any, ...]]]()
        with Join([], process_group=collective, divide_by_initial_world_size=False) as join:
            for loaders, options in programs:
                weigh = float if kind != "none" else None
                loop = join.iterate(loaders[collective.rank], weigh=weigh, **options)
                steps = [join.channel.place.step for _ in loop]
                found.append([(s.contributors, s.first_with_data, s.of_all, s.total) for s in steps])
        return found

    programs = list[tuple[list[list[float]], dict[str, Any]]]()
    for _ in range(25):
        loaders = [[draws.choice(WEIGHTS.get(kind, [1])) for _ in range(draws.choice([0, 1, 3, 6]))] for _ in range(3)]
        window, lookahead = draws.choice([1, 2, 3, "all"]), draws.choice([1, 1, 2, 40])
        programs.append((loaders, {"until": draws.choice(["all", "first"]), "window": window, "lookahead": lookahead}))
    wanted = [expected(loaders, o["until"], 99 if o["window"] == "all" else o["window"]) for loaders, o in programs]
    assert run_threads(3, run) == [wanted] * 3


def test_the_roll_call_of_a_usual_loop_is_one_word() -> None:
    options = Options("all", "empty", 1, None, 1, False)
    assert bits_of(options, 2) == bits_of(options, 1000) == 63
