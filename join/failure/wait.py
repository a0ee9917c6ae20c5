"""Explanation of a long wait: :class:`Wait` finds the place of each rank in a block, and one rank logs all places.

A rank *moves* while its counters in the block change, or the number of operations that it has started on any process
group. After ``TIMEOUTS.explain`` without movement, the watch of a rank posts the *place* of its rank on the board. A
place consists of the facts that the library knows, and of the line of the user's code in which the thread that opened
the block is. So if no rank moves, all places are on the board, and no rank has to be asked::

    rank out of data                    rank in a collective of its own       their watches
    ----------------                    -------------------------------       -------------
    waits at the end of the block       waits for the rank out of data        30 s later: each posts its place
                                                                              the lowest waiting rank logs all places

If a place is missing, a watch rings the bell of the board, to tell a rank that moves from one that does not answer. A
rank that moves again posts this, too. Only a watch that has a place to post reads frames. No frame is kept, since
frames hold tensors.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from types import FrameType

from join.collectives._torch_private import one_reader, started_operations
from join.collectives.board import Board, Progress
from join.collectives.timeouts import TIMEOUTS

SWITCH = "JOIN_EXPLAIN_WAITS"
_logger = logging.getLogger("join")
_LIBRARIES = {"torch", "join", "joinables", *sys.stdlib_module_names}
_COMPILERS = "torch._dynamo.convert_frame", "torch._inductor.compile_fx"
_BACKWARD, _C10D = ("torch.autograd.graph", "_engine_run_backward"), "torch.distributed.distributed_c10d"
_SHORT = {"torch._tensor": "torch.Tensor", _C10D: "torch.distributed"}
_RANKS_AT_ONCE = 64  # with more ranks than these, each rank reads and writes the board less often
_MOST_LINES = 16
_SLOWER = 8  # the factor of the time limit in a block where an explanation may have told of a rank that only is slow
_OF_BACKWARD = "the collectives of this backward"


class Wait:
    """Clock of the time since this rank last moved in its block, and the explanation of a long wait.

    Args:
        world_size: The number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self.interval = TIMEOUTS.look * max(1.0, world_size / _RANKS_AT_ONCE)
        """Seconds between two looks at the board."""
        self._grace = max(TIMEOUTS.explain / 15, 4 * self.interval)  # in which the other ranks can post their places
        self._limit = self._first_limit = float("inf") if os.environ.get(SWITCH) == "0" else TIMEOUTS.explain
        self._thread, self._looked_at = threading.get_ident(), time.monotonic()
        self._key: object = None
        self._still = self._settled = self._asked_at = 0.0  # seconds in which this rank has not moved
        self._beats: Mapping[int, int] | None = None  # of the other ranks when the bell was rung
        self._place = ""
        self._has_posted = self._has_explained = False

    def look(self, read: Callable[[], Progress], *, is_asked: bool) -> Progress | None:
        """Return the progress of this rank, with its place if it has not moved; ``None`` if no other rank needs it.

        Args:
            read: Returns the progress of this rank.
            is_asked: Whether a rank has rung the bell.
        """
        progress, now = read(), time.monotonic()
        # All ranks may have been suspended, so a long interval counts as a short one.
        self._still, self._looked_at = self._still + min(now - self._looked_at, 4 * self.interval), now
        key = progress, started_operations()
        if key != self._key:
            is_news, self._has_posted = self._has_posted, False
            self._key, self._still, self._settled, self._asked_at, self._beats = key, 0.0, 0.0, 0.0, None
            self._limit = self._first_limit * (_SLOWER if self._has_explained else 1)
            return progress if is_asked or is_news else None
        if not is_asked and self._still < self._limit - self._grace:
            return None
        progress = placed(progress, self._thread)
        if progress.place != self._place:
            self._place, self._settled = progress.place, self._still
        if self._still - self._settled < self._grace / 2:
            progress = progress._replace(kind="works")
        self._has_posted |= (is_posted := is_asked or self._still >= self._limit)
        return progress._replace(still=self._still) if is_posted else None

    def explain(self, board: Board, own: Progress, others: Mapping[int, Progress]) -> None:
        """Log where the ranks are, if none has moved for long and this one is the lowest that waits.

        Args:
            board: The board, whose bell is rung if a place is missing.
            own: The progress that this rank has posted.
            others: The progress of the other ranks, by rank.
        """
        if own.still < self._limit:
            return
        moving = {rank for rank, other in others.items() if other.still < TIMEOUTS.explain and not other.done}
        if moving or len(others) < board.world_size - 1:
            if own.still - max(self._asked_at, self._limit) < self._grace:
                return
            before, self._asked_at = self._beats, own.still
            self._beats = {rank: other.beat for rank, other in others.items()}
            if before is None or any(self._beats[rank] != before.get(rank) for rank in moving):
                return board.ring()
        answers = {rank: each for rank, each in others.items() if rank not in moving}
        seen = every_rank({**answers, board.rank: own}, board.world_size)
        resting = _of(seen, "rests")
        waiting = _of(seen, "waits", "calls") or resting * (len({seen[rank].place for rank in resting}) > 1)
        self._limit = 2 * own.still * (_SLOWER if _may_take_long(seen) else 1)
        self._has_explained |= bool(waiting)
        if waiting[:1] == [board.rank]:
            text = "\n".join([*places(seen), _advice(seen)])
            _logger.warning("join: no rank has moved for %.0f s.\n%s", own.still, text)


def every_rank(found: Mapping[int, Progress], world_size: int) -> list[Progress]:
    """Return the progress of each rank in rank order, from the progress of ranks that answer."""
    silent = Progress(place="does not answer", kind="silent")
    seen = [found.get(rank, silent) for rank in range(world_size)]
    return [each._replace(place="has left the block", kind="left") if each.done else each for each in seen]


def places(seen: Sequence[Progress]) -> list[str]:
    """Return a line for each place, with the ranks there."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(seen):
        ranks.setdefault(" ".join((each.place or each.doing).split()), []).append(rank)
    lines = [f"  {_named(here)}: {place}" for place, here in ranks.items()]
    return lines if len(lines) <= _MOST_LINES else [*lines[:_MOST_LINES], f"  and {len(lines) - _MOST_LINES} more"]


def _of(seen: Sequence[Progress], *kinds: str) -> list[int]:
    return [rank for rank, each in enumerate(seen) if each.kind in kinds]


def _named(ranks: Sequence[int]) -> str:
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])]
    spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(spans)}"


def _may_take_long(seen: Sequence[Progress]) -> bool:
    """Return whether a rank may be slow only: it works, or its line does not show that it waits for other ranks."""
    return bool(_of(seen, "works", "rests")) or any(each.call == _OF_BACKWARD for each in seen)


def _advice(seen: Sequence[Progress]) -> str:
    """Return the meaning of the wait, and advice."""
    waits, calls, texts = _of(seen, "waits", "left"), _of(seen, "calls", "rests"), {each.place for each in seen}
    if silent := _of(seen, "silent"):
        return (
            f"No answer from {_named(silent)}: a rank that does not answer has not entered the block (ranks without"
            " batches have to enter it, too), its process is stopped or gone, or a function holds Python's global"
            " interpreter lock (GIL)."
        )
    if works := _of(seen, "works"):
        return f"The other ranks wait for {_named(works)}. Nothing is wrong if it takes so long there."
    if len(texts) == 1:
        text = "All ranks are in the same place. Either it takes so long, or ranks cannot reach each other."
    elif waits and calls:
        call = seen[calls[0]].call or "a collective that was started there or earlier"
        fix = "Run the same loop body on all ranks, on dummy batches, too"
        if not any("join.iterate" in place for place in texts):
            first = "List the object that calls them" if " of " in call else "Call it after the block"
            fix = f"{first}, or loop over join.iterate"
        text = f"{_named(waits)} never call{'s' * (len(waits) == 1)} {call}"
        if _may_take_long(seen):
            text = f"Either it takes so long there, or {text}. In the second case: {fix[0].lower()}{fix[1:]}."
        else:
            text = f"{text[0].upper()}{text[1:]}. {fix}."
    else:
        text = "The ranks wait for each other. Run the same collectives in the same order on all ranks."
    return f'{text} Docs: "My job hangs".'


def placed(progress: Progress, thread: int) -> Progress:
    """Return a progress with the place of this rank, its activity and the line of the user's code.

    Args:
        progress: The progress, with the part of the place that the library knows.
        thread: The thread that opened the block.
    """
    if os.environ.get(SWITCH) == "0":
        return progress
    above, modules, line = stack_of(current_frames().get(thread))
    kind, doing, call = "waits", "", ""
    last = next((module for module, _ in above if module != "torch._ops"), "")
    if "waits for" in progress.place and any(module.startswith("join") for module, _ in above):
        pass
    elif any(module == "join.failure.guard" for module, _ in above):
        doing = "waits for the others"
    elif any(module.startswith("torch.utils.data") or module == "join.read_ahead" for module in modules):
        kind, doing = "works", "reads its next batch"
    elif any(module in _COMPILERS for module, _ in above):
        kind, doing = "works", "compiles"
    elif last.startswith(("torch.distributed", "torch.nn.parallel")) or above[:1] == [_BACKWARD]:
        public = [each for each in above if each[0].startswith("torch") and not each[1].startswith(("_", "wrapper"))]
        module, name = public[-1] if public else above[0]
        kind, doing = "calls", f"in {_SHORT.get(module, module)}.{name}"
        call = f"this {name}" if module == _C10D else f"the collectives of this {name}"
    else:
        kind = "rests" if not above or last.startswith(("torch.cuda", "torch.accelerator")) else "works"
    place = ", ".join(filter(None, (progress.place, doing))) or "in the block"
    return progress._replace(place=f"{place} ({line})" if line else place, kind=kind, call=call)


def current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, as ``sys._current_frames`` does, without collecting garbage meanwhile.

    That function holds a lock of the interpreter, and before CPython 3.11.9 may begin a collection with it. If this
    frees a tensor, another thread can run, and wait for the lock while it holds the GIL. Then the process hangs for
    good (python/cpython#106883).
    """
    with one_reader:  # or it would enable the collection while another thread reads
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()  # pyright: ignore[reportPrivateUsage]
        finally:
            if was_enabled:
                gc.enable()


def stack_of(frame: FrameType | None) -> tuple[list[tuple[str, str]], list[str], str]:
    """Return where a thread is.

    Args:
        frame: Its innermost frame.

    Returns:
        The module and function of each frame above the innermost frame of the user's code, the innermost first. The
        modules of all frames. The line of the user's code. If this line is in an installed package, the line of the
        user's own code that called the package follows.
    """
    above, modules = list[tuple[str, str]](), list[str]()
    lines: dict[bool, str] = {}  # by whether it is in an installed package
    while frame is not None:
        code, module = frame.f_code, str(frame.f_globals.get("__name__"))
        modules.append(module)
        is_users = module.partition(".")[0] not in _LIBRARIES
        if is_users and False not in lines:
            name = "" if code.co_name == "<module>" else f", in {code.co_name}"
            line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{name}"
            lines.setdefault("-packages" in code.co_filename, line)
        elif not lines:
            above.append((module, code.co_name))
        frame = frame.f_back
    return above, modules, ", from ".join(lines.values())
