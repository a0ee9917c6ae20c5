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
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tests.harness import ALL
from tests.shorter import using
from tests.worlds.programs import BESIDE, ENDS, LETTERS, run
from tests.worlds.scheduler import in_place
from tests.worlds.transports import TRANSPORTS

SIZES = {2: 3, 3: 2}
"""The number of letters of the longest words, by the number of ranks."""
RIGHT = ("ok", "early", "error")
"""The kinds of verdicts that are as they should be (``programs.kind_of``)."""
FILE = Path(__file__).parent / "verdicts.txt.xz"
_BETWEEN_COLLECTIONS = 200  # programs; each leaves cycles of references, which hold files of lines in shared memory
_judged = itertools.count(1)


class Verdict(NamedTuple):
    """What became of a program: its kind, how each rank ended, and how many blocks each left without an error."""

    kind: str
    outcomes: tuple[str, ...]
    left: tuple[int, ...]

    @property
    def essence(self) -> tuple[str, ...]:
        """The part that does not depend on which rank runs next: its kind, and if it is right, each rank's error.

        If two ranks fail, another rank may name either of them. If ranks are in different places, any may say so.
        """
        errors = [outcome.partition("(")[0] for outcome in self.outcomes if self.kind in RIGHT]
        return (self.kind, *(sorted(errors) if "ProtocolError J810" in errors else errors))


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
    if not next(_judged) % _BETWEEN_COLLECTIONS:
        gc.collect()
    return ",".join(result.words), Verdict(result.kind, result.outcomes, result.left)


def stands_for(words: Sequence[str], is_open: Sequence[bool] = ()) -> Iterator[str]:
    """Yield what may have been read of programs that begin with these words and may have more letters."""
    opens = is_open or [False] * len(words)
    begins = ([f"{word[:end]}*" for end in range(len(word) + 1)] for word in words)
    each = [begin if is_more else [*begin, word] for begin, word, is_more in zip(begins, words, opens, strict=True)]
    return map(",".join, itertools.product(*each))


class Part(NamedTuple):
    """Programs whose words begin like ``words``, and have up to ``longest`` letters.

    Attributes:
        over: The transport.
        words: The beginning of each rank's word.
        is_open: Whether other letters may follow it, by rank.
        longest: The largest number of letters of a word.
        seed: What decides which rank runs next.
    """

    over: str
    words: tuple[str, ...]
    is_open: tuple[bool, ...]
    longest: int
    seed: int = 0

    def judge(self) -> Verdicts:
        """Run each program that no other one stands for; of those that differ in the order of ranks, one."""
        found: Verdicts = {}
        with ready():
            self._judge(found, {})
        return found

    def _judge(self, found: Verdicts, ran: dict[tuple[str, ...], tuple[str, Verdict]]) -> None:
        if any((self.over, read) in found for read in stands_for(self.words, self.is_open)):
            return
        if self.words not in ran:
            ran[self.words] = judge(self.over, ",".join(self.words), self.longest, self.seed)
        read, verdict = ran[self.words]
        for rank, word in enumerate(read.split(",")):
            if self.is_open[rank] and not word.endswith("*"):  # it has asked for more
                for part in self.split(rank):
                    part._judge(found, ran)
                return
        found[self.over, read] = verdict

    def split(self, rank: int) -> Iterator[Part]:
        """Yield the parts in which the word of a rank ends here, or has another letter."""
        for letter in ("", *sorted(LETTERS.keys() - BESIDE)):
            word = self.words[rank] + letter
            words, is_open = [*self.words], [*self.is_open]
            words[rank], is_open[rank] = word, letter not in ("", *ENDS) and len(word) < self.longest
            if not any(map(_is_other_order, words, words[1:], is_open[1:])):
                yield self._replace(words=(*words,), is_open=(*is_open,))


def _is_other_order(word: str, following: str, is_open: bool) -> bool:
    """Return whether a word comes after the one of the next rank, whatever follows there."""
    return word > following and not (is_open and word.startswith(following))


def parts(over: Iterable[str] = TRANSPORTS, sizes: dict[int, int] = SIZES, seed: int = 0) -> list[Part]:
    """Return parts of all programs, of which the letter of each word is known."""
    found = [Part(name, ("",) * ranks, (True,) * ranks, size, seed) for name in over for ranks, size in sizes.items()]
    for rank in range(max(sizes)):
        found = [each for part in found for each in (part.split(rank) if rank < len(part.words) else [part])]
    return found


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


@cache
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
        if None in pair or pair[0].essence != pair[1].essence:
            found[pair].append(key)
    return found


def sample(verdicts: Verdicts, number: int, seed: int) -> list[tuple[str, str]]:
    """Return so many programs with their transports: of each verdict one, or of each essence, and others at random."""
    some = {verdict if ALL else verdict.essence: key for key, verdict in verdicts.items()}
    return [*some.values(), *random.Random(seed).sample(sorted(verdicts), number)]
