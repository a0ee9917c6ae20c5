"""The files that the ranks of a block have written, read and put on one clock: :func:`read`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from join.recording import COLUMNS, FORMAT, SUFFIX, VERSION, part_of

_MAY_DISAGREE = 1e-3  # seconds: by how much clocks may contradict the order of messages before that is told


class TraceError(Exception):
    """There is no trace, or it cannot be read; the text says what to do."""


class Event(NamedTuple):
    """One thing that happened on a rank; ``join.recording`` has the kinds.

    Attributes:
        kind: what it is.
        begin: seconds since the first rank entered the block.
        end: the same.
        what: the name of the joinable, or what else it is of; may be empty.
        number: that of the burst, of the header, or of the step; ``None`` without one.
    """

    kind: str
    begin: float
    end: float
    what: str
    number: int | None


@dataclass
class Part:
    """What one rank has written.

    Attributes:
        host: its machine.
        process: its process.
        error: the exception with which it left the block, if any.
        announced: how often it announced the joinable that it announced most.
        shadowed: likewise, of what it took part in with nothing to say.
        ended: when it left the block, on the clock of the run.
        events: in the order in which they began.
    """

    host: str
    process: int
    error: str | None
    announced: int
    shadowed: int
    ended: float
    events: list[Event]


@dataclass
class Run:
    """A block on all ranks.

    Attributes:
        path: as it was given to ``join.trace``.
        world_size: the number of ranks.
        parts: what each has written, by rank; those that have written nothing are missing.
        remarks: what to know about it, a sentence each.
    """

    path: Path
    world_size: int
    parts: dict[int, Part]
    remarks: list[str] = field(default_factory=list[str])

    @property
    def ended(self) -> float:
        """When the last rank left the block."""
        return max(part.ended for part in self.parts.values())


def read(path: Path) -> Run:
    """Read what all ranks have written.

    Args:
        path: as it was given to ``join.trace``, or one of the files.

    Raises:
        TraceError: if there is nothing, or something else.
    """
    path = path.with_name(re.sub(rf"\.rank\d+({re.escape(SUFFIX)})$", r"\1", path.name))
    named = re.compile(rf"{re.escape(path.stem)}\.rank(\d+){re.escape(SUFFIX)}")
    folder = path.parent.iterdir() if path.parent.is_dir() else ()
    files = sorted(each for each in folder if named.fullmatch(each.name))
    if not files:
        raise TraceError(
            f"there is no {part_of(path, 0)}: call join.trace({path.name!r}) in the block, on all ranks; each writes"
            " its file when it leaves the block [J287]"
        )
    told = [_loaded(file) for file in files]
    newest = max(told, key=lambda each: each["entered"])
    mine = {each["rank"]: each for each in told if each["world_size"] == newest["world_size"]}
    run = Run(path, newest["world_size"], {})
    if len(mine) < len(told):
        run.remarks.append(f"{len(told) - len(mine)} files of a run with another number of ranks were left out")
    shifts = _shifts(mine, run.remarks)
    for rank, each in sorted(mine.items()):
        run.parts[rank] = _part(each, shifts[rank])
        if run.parts[rank].error:
            run.remarks.append(f"rank {rank} left the block with {run.parts[rank].error}")
        if each["left_out"]:
            run.remarks.append(f"rank {rank} has kept its newest events: the oldest {each['left_out']} are missing")
    missing = [rank for rank in range(run.world_size) if rank not in mine]
    if missing:
        run.remarks.append(
            f"nothing is there of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}: killed in the block,"
            " never called join.trace, or wrote on another machine (copy its file here)"
        )
    return run


def _loaded(file: Path) -> dict[str, Any]:
    try:
        told: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TraceError(f"{file} is no JSON ({error}); give what join.trace has written [J288]") from error
    if not isinstance(told, dict) or cast("dict[str, Any]", told).get("format") != FORMAT:
        raise TraceError(f"{file} is no trace; give the path that join.trace was given [J289]")
    told = cast("dict[str, Any]", told)
    if told["version"] != VERSION or tuple(told["columns"]) != COLUMNS:
        raise TraceError(f"{file} was written by another version of joinables; read it with that one [J290]")
    return told


# -- one clock --------------------------------------------------------------------------------------------------------


def _shifts(told: dict[int, dict[str, Any]], remarks: list[str]) -> dict[int, float]:
    """What to add to the times of each rank, so that all count from when the first one entered.

    The clocks of machines differ. A rank sends a header only after it has read the one before, which all had sent by
    then: where clocks contradict that, they are shifted until they do not.
    """
    first, *others = sorted(told)
    shifts = {first: 0.0}
    sent = {rank: _sent(each["events"]) for rank, each in told.items()}
    for rank in others:
        by_clock = told[rank]["entered"] - told[first]["entered"]
        least = max((at - sent[rank][n + 1] for n, at in sent[first].items() if n + 1 in sent[rank]), default=by_clock)
        most = min((sent[first][n + 1] - at for n, at in sent[rank].items() if n + 1 in sent[first]), default=by_clock)
        shifts[rank] = by_clock if least <= by_clock <= most else (least if by_clock < least else most)
        if least > most + _MAY_DISAGREE:
            remarks.append(f"the files of ranks {first} and {rank} do not fit together: they may be of different runs")
        elif abs(shifts[rank] - by_clock) > _MAY_DISAGREE:
            remarks.append(f"the clock of rank {rank} was corrected by {1e3 * (shifts[rank] - by_clock):.1f} ms")
    earliest = min(shifts.values())
    return {rank: shift - earliest for rank, shift in shifts.items()}


def _sent(events: Sequence[Sequence[Any]]) -> dict[int, float]:
    """When each header went out, by its number."""
    return {number: begin for kind, begin, _, _, number in events if kind == "sent"}


def _part(told: dict[str, Any], shift: float) -> Part:
    names = _told_apart(told["joinables"])
    events = [
        Event(kind, begin + shift, end + shift, names[what] if isinstance(what, int) else what or "", number)
        for kind, begin, end, what, number in told["events"]
    ]
    return Part(
        host=told["host"],
        process=told["process"],
        error=told["error"],
        announced=max(told["announced"], default=0),
        shadowed=max(told["shadowed"], default=0),
        ended=told["ended"] + shift,
        events=events,
    )


def _told_apart(names: list[str]) -> list[str]:
    """The names, with a number after those that stand there more than once, such as two modules of one class."""
    return [
        f"{name} ({names[: at + 1].count(name)})" if names.count(name) > 1 else name for at, name in enumerate(names)
    ]
