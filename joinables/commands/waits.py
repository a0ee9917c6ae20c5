"""Who waited for whom, and how long headers took: :class:`Waits`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from joinables.commands.parts import Event, Run

BURSTS = ("ran", "shadowed", "unfinished")
"""The kinds of events in which ranks meet."""


class Wait(NamedTuple):
    """One rank waits for others.

    Attributes:
        rank: the one that waits.
        event: what it waits in: for a header, or in a burst.
        came: when all others were there.
        shares: how many seconds it waited for which rank: the one that came last, or where that was waiting itself,
            whom that waited for.
    """

    rank: int
    event: Event
    came: float
    shares: Mapping[int, float]

    @property
    def on(self) -> int:
        """The rank that it waited for longest."""
        return max(self.shares, key=lambda rank: self.shares[rank])


@dataclass
class Waits:
    """The waits of a run.

    Attributes:
        all: each of them, by when they began.
        latencies: for each rank that waited for headers, how many seconds after the last rank had sent one it went on.
    """

    all: list[Wait] = field(default_factory=list[Wait])
    latencies: dict[int, list[float]] = field(default_factory=dict[int, list[float]])

    @property
    def seconds(self) -> dict[tuple[int, int], float]:
        """How long each rank waited for each other, in all: ``[rank that waits, rank that it waits for]``."""
        sums: dict[tuple[int, int], float] = defaultdict(float)
        for wait in self.all:
            for on, seconds in wait.shares.items():
                sums[wait.rank, on] += seconds
        return dict(sums)


class _Late(NamedTuple):
    """A rank waits for the one that comes last."""

    rank: int
    event: Event
    last: int
    came: float


def waits_of(run: Run) -> Waits:
    """Find out who waited for whom: for each header, and in each burst, all wait for the rank that comes last.

    A header counts if all ranks have said when they sent it; a burst if all have run it or taken part.
    """
    found, late = Waits(), list[_Late]()
    sent: dict[int, dict[int, float]] = defaultdict(dict)
    bursts: dict[tuple[str, int], dict[int, Event]] = defaultdict(dict)
    for rank, part in run.parts.items():
        for event in part.events:
            if event.number is None:
                continue
            if event.kind == "sent":
                sent[event.number][rank] = event.begin
            elif event.kind in BURSTS:
                bursts[event.what, event.number][rank] = event
    for rank, part in run.parts.items():
        for event in part.events:
            is_header = event.kind == "waited" and event.number is not None
            came: dict[int, float] = sent.get(event.number or 0, {}) if is_header else {}
            last = max(came, key=lambda each: came[each]) if len(came) == run.world_size else rank
            if last != rank and event.begin < came[last] <= event.end:
                late.append(_Late(rank, event, last, came[last]))
                found.latencies.setdefault(rank, []).append(event.end - came[last])
    for by_rank in bursts.values():
        if len(by_rank) == run.world_size:
            last = max(by_rank, key=lambda each: by_rank[each].begin)
            begin = by_rank[last].begin
            late += [_Late(rank, each, last, begin) for rank, each in by_rank.items() if each.begin < begin < each.end]
    found.all = sorted(_shared_out(late), key=lambda wait: wait.event.begin)
    return found


def _shared_out(late: list[_Late]) -> Iterator[Wait]:
    """Whom each rank waited for: where the one that came last was waiting itself, the one that held it up."""
    held_up: dict[int, list[tuple[float, float, int]]] = defaultdict(list)  # from when to when, and by which rank
    for rank, event, last, came in sorted(late, key=lambda each: each.came):
        spans, until = list[tuple[float, float, int]](), came
        for begin, end, by in reversed(held_up[last]):
            if end <= event.begin:
                break
            begin, end = max(begin, event.begin), min(end, until)
            if begin < end and by != rank:
                spans += [(end, until, last), (begin, end, by)]
                until = begin
        spans.append((event.begin, until, last))
        held_up[rank] += reversed(spans)
        shares: dict[int, float] = defaultdict(float)
        for begin, end, by in spans:
            if end > begin:
                shares[by] += end - begin
        yield Wait(rank, event, came, dict(shares))
