"""All programs of a few letters end as they did before, and the letters reach all states and messages."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from typing import Any

import pytest

from tests.harness import ALL, NIGHT, at_night, in_test_all
from tests.worlds.programs import BESIDE, ENDS, LETTERS
from tests.worlds.reached import Reached
from tests.worlds.scheduler import THREADING as threads
from tests.worlds.scheduler import TIME, Scheduler
from tests.worlds.transports import TRANSPORTS
from tests.worlds.verdicts import RIGHT, SIZES, judge, kept, ready, sample

SAMPLED = 500 if ALL else 20
"""Programs over each transport, beside one for each verdict; ``python -m tests.worlds`` runs all."""
LONGER = ("b1,b1", "!i,!", "iii,iii", "2,1")
"""Programs of more than one letter that reach more than pairs of letters do."""
UNREACHED = {
    "Join._enable is False": "then nothing is sent: test_alone.py",
    "LateUse._has_samples is True": "no dummy has samples here: tests/join/loop",
    "ReadAhead._resumable is True": "no loader keeps its state here: tests/join/loop",
    "Roster.is_alone is True": "a block has two bursts here: test_channel.py",
    "Rounds._fits is False": "no round is that long here: tests/join/loop",
    "block._compare sends all_gather_object": "values that differ: tests/joinables",
    "Held._has_unread_tensors is True": "nothing has attributes here: tests/joinables/test_held.py",
    "held.compare sends all_gather_object": "nothing has attributes here: tests/joinables/test_held.py",
    "loop._read_all sends gather_numbers": "window='all': tests/join/loop",
    "_Tree._whole is True": "of metrics",
    "transfer._move sends broadcast": "a tensor alone in its message: test_transfer.py",
    "transfer.copy_state sends all_gather_object": "state that does not fit: test_transfer.py",
    "transfer.gather_trees sends all_gather_object": "of metrics",
}
"""What no letter reaches, with the reason."""


@pytest.mark.parametrize("over", TRANSPORTS)
def test_programs_end_as_before(over: str) -> None:
    """Where they ended right; ``python -m tests.worlds`` shows where they hang no more, too."""
    before = {key: verdict for key, verdict in kept().items() if key[0] == over and verdict.kind in RIGHT}
    with ready():
        for _, program in sample(before, SAMPLED, seed=0):
            _, now = judge(over, program, SIZES[program.count(",") + 1])
            assert now.essence == before[over, program].essence, f"{program}, now {now}: see python -m tests.worlds"


def test_programs_with_letters_beside_the_kept_ones_end_right() -> None:
    """All words of up to two letters on two ranks; those with the same word on both, which end well, in each run."""
    words = ["", *LETTERS, *map("".join, itertools.product(LETTERS, repeat=2))]
    pairs = [pair for pair in itertools.combinations_with_replacement(words, 2) if {*BESIDE} & {*"".join(pair)}]
    alike = [(one, other) for one, other in pairs if one == other and not {*ENDS, "f"} & {*one}]
    with ready():
        for over in TRANSPORTS:
            for pair in [*alike, *(pairs if NIGHT else random.Random(0).sample(pairs, SAMPLED))]:
                _, now = judge(over, ",".join(pair), 2)
                assert now.kind in (("ok",) if pair in alike else RIGHT), f"{pair} over {over}: {now}"


@in_test_all
def test_who_runs_next_makes_no_difference() -> None:
    before = {key: verdict for key, verdict in kept().items() if verdict.kind in RIGHT}
    with ready():
        for over, program in sample(before, SAMPLED, seed=1)[-SAMPLED:]:
            for seed in (1, 2, 3):
                _, now = judge(over, program, SIZES[program.count(",") + 1], seed)
                assert now.essence == before[over, program].essence, f"{program} over {over}, seed {seed}: {now}"


@pytest.mark.parametrize("over", TRANSPORTS)
def test_programs_of_four_letters_end_in_known_ways(over: str) -> None:
    known = {(verdict.kind, *sorted(verdict.outcomes)) for verdict in kept().values()}
    draw, letters = random.Random(4), sorted(LETTERS.keys() - BESIDE)
    with ready():
        for _ in range(40 * SAMPLED if NIGHT else SAMPLED):
            program = ",".join("".join(draw.choices(letters, k=4)) for _ in range(2))
            _, now = judge(over, program, 4)
            assert now.kind in RIGHT or (now.kind, *sorted(now.outcomes)) in known, f"{program} over {over}: {now}"


@at_night
def test_all_programs_end_as_before() -> None:
    ended = subprocess.run([sys.executable, "-m", "tests.worlds"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-4000:]


@in_test_all
def test_letters_reach_all_states_and_messages() -> None:
    Scheduler.trace = reached = Reached()
    try:
        with ready():
            pairs = map(",".join, itertools.combinations_with_replacement(["", *LETTERS], 2))
            for program in (*pairs, *LONGER):
                judge("group", program, SIZES[2])
            judge("memory", "i,i", SIZES[2])
    finally:
        Scheduler.trace = None
    assert reached.missing() == UNREACHED.keys()


# -- the scheduler -----------------------------------------------------------------------------------------------------


def test_ranks_that_wait_for_each_other_hang() -> None:
    one, other = threads.Lock(), threads.Lock()

    def take(first: Any, second: Any) -> None:
        with first:
            TIME.sleep(1.0)
            second.acquire()

    def both() -> None:
        each = [threads.Thread(target=take, args=locks) for locks in ((one, other), (other, one))]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()

    scheduler = Scheduler(seed=0)
    with pytest.raises(RuntimeError, match="hang"):
        scheduler.run(both)
    assert scheduler.has_hung


def test_a_seed_decides_and_time_passes_at_once() -> None:
    def order(seed: int) -> list[tuple[int, float]]:
        seen = list[tuple[int, float]]()

        def run(number: int) -> None:
            for _ in range(3):
                TIME.sleep(1.0)
                seen.append((number, round(TIME.monotonic())))

        def start() -> None:
            each = [threads.Thread(target=run, args=(number,)) for number in range(3)]
            for thread in each:
                thread.start()
            for thread in each:
                thread.join()

        Scheduler(seed).run(start)
        return seen

    assert order(1) == order(1)
    assert {number for number, _ in order(1)} == {0, 1, 2}
    assert order(1)[-1][1] == 3
