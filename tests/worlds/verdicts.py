"""The verdicts on all small programs: :func:`judge_all` finds them, and :func:`kept` returns those of before.

A program is written as the words of its ranks with commas between them. ``i*,1`` stands for all programs in which one
rank makes an iteration and reads no more, since it fails in it, and the other one runs a loop of one batch and leaves.
"""

from __future__ import annotations

import gc
import itertools
import logging
import lzma
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tests.shorter import using
from tests.worlds.programs import ENDS, LETTERS, run
from tests.worlds.scheduler import in_place
from tests.worlds.transports import TRANSPORTS

SIZES = {2: 3, 3: 2}
"""The number of letters of the longest words, by the number of ranks."""
RIGHT = ("ok", "early", "error")
"""The kinds of verdicts that are as they should be (``programs.kind_of``)."""
FILE = Path(__file__).parent / "verdicts.txt.xz"
_BETWEEN_COLLECTIONS = 200  # programs; each leaves cycles of references


class Verdict(NamedTuple):
    """What became of a program: its kind, how each rank ended, and how many blocks each left without an error."""

    kind: str
    outcomes: tuple[str, ...]
    left: tuple[int, ...]


Verdicts: TypeAlias = dict[tuple[str, str], Verdict]
"""Verdicts by transport and program."""


@contextmanager
def ready() -> Iterator[None]:
    """Let programs run in this process, one at a time, for the duration of a context."""
    with ExitStack() as stack:
        stack.enter_context(in_place())
        stack.enter_context(using(still=1.0, silent=3.0, beat=1.0, cause=1.0, note=1.0, explain=1e9))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)
        stack.callback(gc.enable)
        gc.disable()
        yield


def judge(over: str, program: str, longest: int, seed: int = 0) -> tuple[str, Verdict]:
    """Run a program; return what was read of it, and the verdict."""
    result = run(program.replace("*", "").split(","), TRANSPORTS[over], longest, seed)
    return ",".join(result.words), Verdict(result.kind, result.outcomes, result.left)


def words(longest: int) -> list[str]:
    """Return all words of up to so many letters, in alphabetical order."""
    if not longest:
        return [""]
    rest = words(longest - 1)
    return ["", *(letter + word for letter in sorted(LETTERS) for word in (rest if letter not in ENDS else [""]))]


def stands_for(program: Sequence[str]) -> Iterator[str]:
    """Yield what may have been read of a program, and stands for it."""
    each = [[word, *(f"{word[:end]}*" for end in range(len(word) + 1))] for word in program]
    return map(",".join, itertools.product(*each))


class Part(NamedTuple):
    """Programs whose words begin with these letters, one for each rank, and have up to ``longest`` letters."""

    over: str
    first: tuple[str, ...]
    longest: int
    seed: int = 0

    def judge(self) -> Verdicts:
        """Run each of these programs that no other one stands for; of those that differ in the order of ranks, one."""
        found: Verdicts = {}
        every = [[word for word in words(self.longest) if word[:1] == letter] for letter in self.first]
        with ready():
            for program in itertools.product(*every):
                is_other_order = any(one > other for one, other in itertools.pairwise(program))
                if is_other_order or any((self.over, each) in found for each in stands_for(program)):
                    continue
                read, verdict = judge(self.over, ",".join(program), self.longest, self.seed)
                found[self.over, read] = verdict
                if not len(found) % _BETWEEN_COLLECTIONS:
                    gc.collect()
        return found


def parts(over: Iterable[str] = TRANSPORTS, sizes: dict[int, int] = SIZES, seed: int = 0) -> list[Part]:
    """Return all parts, the longest ones first."""
    letters = sorted(["", *LETTERS])
    each = [
        Part(name, first, longest, seed)
        for name in over
        for ranks, longest in sizes.items()
        for first in itertools.combinations_with_replacement(letters, ranks)
    ]
    return sorted(each, key=lambda part: len({*part.first}))  # the same letter on all ranks fails least


def judge_all(each: Sequence[Part], processes: int) -> Iterator[Verdicts]:
    """Yield the verdicts of each part, as they are found."""
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with context.Pool(processes, _take_one_processor, (context.Value("i", 0),)) as pool:
        yield from pool.imap_unordered(Part.judge, each)


def _take_one_processor(count: Any) -> None:
    """Threads of which one runs at a time hand over faster on one processor."""
    with count.get_lock():
        count.value += 1
        usable = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {usable[count.value % len(usable)]})


# -- what was kept -----------------------------------------------------------------------------------------------------


def keep(verdicts: Verdicts) -> None:
    """Write the verdicts: a line for all programs that have the same one over the same transports."""
    over = defaultdict[tuple[str, Verdict], list[str]](list)
    for (name, program), verdict in sorted(verdicts.items()):
        over[program, verdict].append(name)
    lines = defaultdict[tuple[str, ...], list[str]](list)
    for (program, verdict), names in over.items():
        kind, outcomes, left = verdict
        lines[" ".join(names), kind, "; ".join(outcomes), " ".join(map(str, left))].append(program)
    text = "".join(f"{' | '.join(line)} | {' '.join(programs)}\n" for line, programs in sorted(lines.items()))
    FILE.write_bytes(lzma.compress(text.encode(), preset=9))


def kept() -> Verdicts:
    """Return the verdicts that :func:`keep` wrote."""
    found: Verdicts = {}
    for line in lzma.decompress(FILE.read_bytes()).decode().splitlines():
        names, kind, outcomes, left, programs = line.split(" | ")
        verdict = Verdict(kind, tuple(outcomes.split("; ")), tuple(map(int, left.split())))
        found.update({(name, program): verdict for program in programs.split(" ") for name in names.split()})
    return found


def find(verdicts: Verdicts, over: str, program: str) -> Verdict | None:
    """Return the verdict on a program, or on one that stands for it."""
    exact = verdicts.get((over, program))
    every = (verdicts.get((over, each)) for each in stands_for(program.replace("*", "").split(",")))
    return exact or next((verdict for verdict in every if verdict), None)


def changed(before: Verdicts, now: Verdicts) -> dict[tuple[Verdict | None, Verdict | None], list[tuple[str, str]]]:
    """Return the programs whose verdict is another one now, by the verdicts before and now."""
    found = defaultdict[tuple["Verdict | None", "Verdict | None"], list[tuple[str, str]]](list)
    for key in {**before, **now}:
        pair = find(before, *key), find(now, *key)
        if pair[0] != pair[1]:
            found[pair].append(key)
    return found


def sample(verdicts: Verdicts, number: int, seed: int) -> list[tuple[str, str]]:
    """Return so many programs with their transports: of each verdict one, and others at random."""
    some = {verdict: key for key, verdict in verdicts.items()}
    return [*some.values(), *random.Random(seed).sample(sorted(verdicts), number)]
