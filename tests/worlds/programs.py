"""What a rank may do, as words: :data:`LETTERS`, and :func:`run`, which runs a word on each rank.

A rank enters a block, does what the letters of its word say, and leaves. Its joinables are a *leader*, which announces
as it is the first in the list, a *follower* of it, and an *own* burst, which is announced before it runs, as a backward
may be. In each burst all ranks sum up a number whose digits say which ranks had something to say.

A rank reads a letter when it comes to it. So a program that ends earlier stands for all programs that begin like it:
the words in a :class:`Result` are what was read, with ``*`` where the rest was not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from typing_extensions import override

from join import Burst, Join, Joinable, JoinError, JoinHook, PeerError
from join.collectives import Collective, run_threads
from join.transfer import Exchange
from tests.worlds.scheduler import THREADING as threads
from tests.worlds.scheduler import Killed, Scheduler

ENDS = "xe"
"""The letters after which a rank reads no more."""
MOST_EXCHANGES = 200
"""The largest number of collectives of a rank in a program that ends; three letters take less than 60."""


class Boom(Exception):
    """What a rank raises by itself."""


class Sum(JoinHook):
    """The collective of a burst: a sum over all ranks. Each burst has a tensor of its own size."""

    def __init__(self, group: Collective, size: int) -> None:
        self.group, self.size, self.sums = group, size, list[int]()

    def reduce(self, number: int) -> None:
        numbers = torch.full((self.size,), number)
        self.group.all_reduce(numbers).wait()
        self.sums.append(int(numbers[0]))

    @override
    def main_hook(self) -> None:
        self.reduce(0)


class Plain(Joinable):
    """A joinable with one collective."""

    def __init__(self, group: Collective, size: int) -> None:
        super().__init__()
        self.sum = Sum(group, size)

    def __call__(self, number: int) -> None:
        Join.notify_join_context(self)
        self.sum.reduce(number)

    @override
    def join_hook(self, **kwargs: Any) -> JoinHook:
        return self.sum

    @property
    @override
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    @override
    def join_process_group(self) -> Any:
        return self.sum.group


class Stepped(Plain):
    """The leader: ``state`` counts steps, as an optimizer does, and ``buffer`` differs between ranks."""

    def __init__(self, group: Collective, size: int) -> None:
        super().__init__(group, size)
        self.state, self.buffer = 0, torch.zeros(1, dtype=torch.int64)

    @override
    def __call__(self, number: int) -> None:
        super().__call__(number)
        self.state += 1
        if number:
            self.buffer += number

    @override
    def equal_values(self) -> dict[str, Any]:
        return {"state": self.state}

    @override
    def own_tensors(self) -> Sequence[torch.Tensor]:
        return [self.buffer]

    @override
    def exchange(self, source: int) -> Exchange:
        inbox = yield {"state": self.state, "buffer": self.buffer}
        sent = inbox.fill(inbox.skeleton, {"state": self.state, "buffer": self.buffer})
        yield ""
        self.state, self.buffer = sent["state"], sent["buffer"]


class Own(Plain, Burst):
    """A burst of its own, which is announced before it runs, has a flag in headers, and needs to know who leads."""

    runs_ahead, tracks_leader, flag_count = True, True, 1

    @override
    def flags(self, active: bool) -> Sequence[int]:
        return (active,)

    @override
    def hand_over(self, leader: int) -> None:
        told = torch.full((5,), self.sum.group.rank)
        self.sum.group.broadcast(told, leader).wait()
        assert told.tolist() == [leader] * 5

    @override
    def __call__(self, number: int) -> None:
        self.announce()
        self.is_pending = False
        self.sum.reduce(number)

    def announce(self) -> None:
        Join.notify_join_context(self)
        self.is_pending = True

    @override
    def fulfil(self) -> None:
        self.is_pending = False
        self.sum.reduce(0)


class Rank:
    """A rank that runs its word."""

    def __init__(self, group: Collective, word: str, longest: int) -> None:
        self.group, self.word, self.longest = group, word, longest
        self.number = 10**group.rank
        self.read, self.outcome = "", ""
        self.ended = threads.Event()
        self.leader, self.follower = Stepped(group, 1), Plain(group, 2)
        self.own, self.inner, self.after = Own(group, 3), Own(group, 4), Plain(group, 6)
        self.left = 0
        """The number of blocks that it has left without an error."""

    def __call__(self) -> None:
        """Run the word, and keep how that ends."""
        Scheduler.current.begin_process()
        try:
            self._run()
            self.outcome = "ok"
        except Killed:
            self.outcome = self.outcome or "hangs"
            raise
        except BaseException as error:
            self.outcome = named(error)
            raise
        finally:
            self.ended.set()

    def _run(self) -> None:
        more: str | None = "|"
        while more is not None:
            throws, more = more == "!", None
            with Join(self.listed, throw_on_early_termination=throws) as self.join:
                while (letter := self._next()) is not None:
                    if letter in "|!":
                        more = letter
                        break
                    LETTERS[letter](self)
            self.left += 1

    @property
    def listed(self) -> list[Joinable]:
        return [self.leader, self.follower, self.own]

    def _next(self) -> str | None:
        if len(self.read) == self.longest:
            return None
        letter = self.word[len(self.read) : len(self.read) + 1]
        self.read += letter or "."
        return letter or None

    def read_so_far(self) -> str:
        """Return the letters that were read, with ``*`` if others might have followed."""
        is_whole = self.read.endswith((*ENDS, ".")) or len(self.read) == self.longest
        return self.read.rstrip(".") + "*" * (not is_whole)

    def step(self) -> None:
        number = 0 if self.join.shadowing else self.number
        self.own(number)
        self.leader(number)
        self.follower(number)

    def skip(self) -> None:
        self.own.announce()
        self.leader(self.number)
        self.follower(self.number)

    def twice(self) -> None:
        self.own(self.number)
        self.step()

    def alone(self) -> None:
        self.own(self.number)
        self.leader(self.number)

    def nest(self) -> None:
        with Join([self.inner]):
            self.inner(self.number)

    def pend(self) -> None:
        with Join([self.inner, self.after]):
            self.inner.announce()
            self.after(self.number)
            self.inner.announce()  # the block ends before it runs, and before what follows it

    def loop(self, batches: int, *, breaks: bool = False) -> None:
        for _ in self.join.iterate([torch.zeros(1)] * batches):
            if breaks:
                self.alone()
                break
            self.step()

    def fail(self) -> None:
        raise Boom

    def end(self) -> None:
        self.outcome = "ended"
        self.ended.set()
        Scheduler.current.end_process()


LETTERS: dict[str, Callable[[Rank], None]] = {
    "i": Rank.step,
    "s": Rank.skip,
    "t": Rank.twice,
    "f": Rank.alone,
    "n": Rank.nest,
    "p": Rank.pend,
    "0": lambda rank: rank.loop(0),
    "1": lambda rank: rank.loop(1),
    "2": lambda rank: rank.loop(2),
    "b": lambda rank: rank.loop(2, breaks=True),
    "x": Rank.fail,
    "e": Rank.end,
    "|": lambda rank: None,
    "!": lambda rank: None,
}


BESIDE = "p"
"""Letters that ``verdicts.parts`` leaves out: programs with them are compared with :func:`reference` alone."""


def named(error: BaseException) -> str:
    """Return an error in short: its class and code, and for another rank's error that rank, with class and code."""
    text, kind = str(error), type(error).__name__
    codes = re.findall(r"\[(J\d+)\]", text)
    code = f" {codes[0]}" if codes else ""
    if isinstance(error, PeerError):
        causes = [" ".join(cause) for cause in re.findall(r"rank (\d+) failed: (\w+)", text)]
        for ranks in re.findall(r"ranks? \[?([\d, ]+)\]? (?:is|are) gone", text):
            causes += [f"{rank} gone" for rank in ranks.split(", ")]
        return f"{kind}({', '.join(causes) or 'nobody'}{code})"
    if isinstance(error, (JoinError, Boom)):
        return kind + code
    return f"{kind}{code or f': {text[:60]}'}"


def quietly(call: Callable[[], object]) -> Callable[[], None]:
    """A call whose exception is kept elsewhere."""

    def called() -> None:
        with suppress(Exception):
            call()

    return called


STEPS = {"i": (1, 1, 1), "s": (0, 1, 1), "t": (2, 1, 1), "f": (1, 1, 0), "b": (1, 1, 0)}
"""How often a step contributes to its own burst, to the leader's and to the follower's, by letter."""
NESTED = {"n": ((1,),), "p": ((0, 0), (1, 0))}
"""What a nested block contributes to each of its bursts, and to what follows them, by letter."""


def reference(words: Sequence[str]) -> tuple[list[list[int]], int] | None:
    """Return the sums of each joinable and the number of steps, or ``None`` if the ranks do not fit.

    Ranks that fit have as many blocks, and in each as many loops and nested blocks in the same order, with as many
    bursts before each of them.
    """
    sums, steps = [list[int]() for _ in range(5)], 0
    blocks = [re.split(r"[|!]", word) for word in words]
    if not _are_equal(map(len, blocks)):
        return None
    for block in zip(*blocks, strict=True):
        # of a rank: plain steps, a loop or a nested block, plain steps, ...
        parts = [re.split(r"([012bnp])", word) for word in block]
        if not _are_equal(map(len, parts)):
            return None
        for at, part in enumerate(zip(*parts, strict=True), 1):
            words_of_steps = [each.replace("0", "").replace("1", "i").replace("2", "ii") for each in part]
            rows = [_contributions(word, 10**rank) for rank, word in enumerate(words_of_steps)]
            is_plain, is_last = at % 2 == 1, at == len(parts[0])
            if ("b" in part and not _are_equal(part)) or not _are_equal(word in NESTED for word in part):
                return None
            if is_plain and not is_last and not _are_equal([*map(len, row)] for row in rows):
                return None
            for total, of_ranks in zip(sums, zip(*rows, strict=True), strict=True):
                total += map(sum, zip_longest(*of_ranks, fillvalue=0))
            steps += max(sum(letter in STEPS for letter in word) for word in words_of_steps)
    return sums, steps


def _are_equal(values: Iterable[Any]) -> bool:
    first, *others = values
    return all(value == first for value in others)


def _contributions(letters: str, number: int) -> list[list[int]]:
    """Return what a rank contributes to each burst of each joinable: its number, or nothing."""
    found = [list[int]() for _ in range(5)]
    for letter in letters:
        for times, row in zip(NESTED.get(letter, ()), found[3:], strict=False):
            row += [number * each for each in times]
        for times, row in zip(STEPS.get(letter, ()), found, strict=False):
            row += [number] * times or [0]
    return found


def kind_of(ranks: Sequence[Rank]) -> str:
    """Return the kind of an end: ``ok``, ``error`` and ``early`` are right.

    - ``ok``: all ranks end well, with the results of :func:`reference`;
    - ``error``: a rank fails, and the others name it, but for ranks that had left before;
    - ``early``: all ranks raise ``EarlyTerminationError``, with the same results;
    - ``wrong``: all ranks end well, with other results;
    - ``mixed``: a collective meets another one than its own;
    - ``unlike``: some ranks leave a block without an error that others leave with one;
    - ``unnamed``: a rank fails because of another, and does not name the right one.
    """
    outcomes = [rank.outcome for rank in ranks]
    found = [
        [each.sum.sums for each in (rank.own, rank.leader, rank.follower, rank.inner, rank.after)] for rank in ranks
    ]
    states = [(rank.leader.state, int(rank.leader.buffer)) for rank in ranks]
    if {*outcomes} == {"ok"}:
        expected = reference([rank.read.rstrip(".") for rank in ranks])
        fits = expected is not None and found == [expected[0]] * len(ranks)
        return "ok" if fits and expected and {*states} == {(expected[1], states[0][1])} else "wrong"
    if all(outcome.startswith("EarlyTermination") for outcome in outcomes):
        return "early" if all(each == found[0] for each in found) else "wrong"
    own = {str(rank): outcome for rank, outcome in enumerate(outcomes)}
    if any(re.match(r"(?!PeerError|ProtocolError|JoinError|Boom|ended|ok|Early)", outcome) for outcome in outcomes):
        return "mixed"
    failed = min(rank.left for rank in ranks if rank.outcome != "ok")
    if any(rank.left > failed for rank in ranks) or any(outcome.startswith("Early") for outcome in outcomes):
        return "unlike"
    for outcome in outcomes:
        if outcome.startswith("PeerError"):
            causes = re.findall(r"(\d) (\w+)", outcome)
            if not causes or not all(
                own[rank].startswith(kind) or (kind == "gone" and own[rank] in ("ended", "ok")) for rank, kind in causes
            ):
                return "unnamed"
    return "error"


@dataclass
class Result:
    """How a program ended.

    Attributes:
        words: What each rank has read, with ``*`` for what it might have read after that.
        outcomes: How each rank ended.
        left: How many blocks each rank left without an error.
        kind: What that is, as :func:`kind_of` says, or ``hang`` if it has no end, or ``crash`` if a thread beside the
            ranks raised an exception.
        exchanges: The largest number of collectives of a rank.
    """

    words: tuple[str, ...]
    outcomes: tuple[str, ...]
    left: tuple[int, ...]
    kind: str
    exchanges: int = 0


def run(words: Sequence[str], over: Callable[[Collective], Collective], longest: int, seed: int = 0) -> Result:
    """Run a word on each rank.

    Args:
        words: The words, in rank order.
        over: Makes the collective of a rank from one of threads.
        longest: The number of letters after which a rank reads no more.
        seed: What decides which rank runs next.
    """
    ranks: dict[int, Rank] = {}
    collectives: list[Collective] = []

    def work(collective: Collective) -> None:
        collectives.append(collective)
        rank = ranks[collective.rank] = Rank(over(collective), words[collective.rank], longest)
        threads.Thread(target=quietly(rank)).start()  # so that the collective learns it if that process ends
        rank.ended.wait()

    scheduler = Scheduler(seed)
    with suppress(Exception):  # which the ranks have kept
        scheduler.run(lambda: run_threads(len(words), work, timeout=1e6))
    every = [ranks[rank] for rank in range(len(words))]
    outcomes = tuple(rank.outcome for rank in every)
    read = tuple(rank.read_so_far() for rank in every)
    exchanges = max(collective.issued_counter()() for collective in collectives)
    has_end = not scheduler.has_hung and exchanges <= MOST_EXCHANGES
    kind = "crash" if scheduler.errors else kind_of(every) if has_end else "hang"
    return Result(read, outcomes, tuple(rank.left for rank in every), kind, exchanges)
