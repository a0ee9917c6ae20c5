"""Who explains a long wait, when and how often, on a clock of the tests; ``test_hang.py`` waits in real processes."""

from __future__ import annotations

import gc
import re
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from join.collectives.board import Progress, StoreBoard
from join.failure import wait
from tests.join.counter import Counting

LOOK = 0.25


class Ranks:
    """The watches of ranks of these kinds, which look at their boards on one clock."""

    def __init__(self, kinds: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        monkeypatch.setattr(wait, "time", self)
        monkeypatch.setattr(wait, "placed", self._placed)
        self.now, self._caplog = 0.0, caplog
        self.store: Any = Counting(dist.HashStore())
        self.kinds, self.places = kinds, [f"at {kind}" for kind in kinds]
        self.progress = [Progress(doing=str(rank)) for rank in range(len(kinds))]
        self.waits = [wait.Wait(len(kinds)) for _ in kinds]
        self.boards = [StoreBoard(rank, len(kinds), self.store) for rank in range(len(kinds))]
        self.silent = set[int]()
        for board in self.boards:
            board.block = 1

    def monotonic(self) -> float:
        return self.now

    def _placed(self, progress: Progress, thread: int) -> Progress:
        rank = int(progress.doing)
        return progress._replace(kind=self.kinds[rank], place=self.places[rank])

    def move(self, rank: int) -> None:
        self.progress[rank] = self.progress[rank]._replace(headers=self.progress[rank].headers + 1)

    def run(self, until: float) -> list[str]:
        """What is logged meanwhile."""
        self._caplog.clear()
        while self.now < until:
            self.now += LOOK
            for rank in sorted({*range(len(self.waits))} - self.silent):
                self._look(rank)
        return [record.getMessage() for record in self._caplog.records]

    def _look(self, rank: int) -> None:
        board, mine = self.boards[rank], self.waits[rank]
        own = mine.look(lambda: self.progress[rank], is_asked=board.is_rung())
        if own is not None:
            others = {other: posted for other, posted in board.progress().items() if other != rank}
            board.tell(own._replace(beat=int(self.now / LOOK)))
            mine.explain(board, own, others)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    return lambda *kinds: Ranks(list(kinds), monkeypatch, caplog)


HANG = """join: no rank has moved for {} s.
  ranks 0, 3: at waits
  ranks 1-2, 4: at calls
Ranks 0, 3 never call a"""


def test_it_is_said_at_doubling_intervals(ranks: Any) -> None:
    waiting = ranks("waits", "calls", "calls", "waits", "calls")
    assert waiting.run(29.75) == []
    assert [text.startswith(HANG.format(30)) for text in waiting.run(59.0)] == [True]
    assert [text.startswith(HANG.format(60)) for text in waiting.run(119.0)] == [True]
    assert len(waiting.run(239.0)) == 1


def test_a_rank_that_moves_starts_anew(ranks: Any) -> None:
    waiting = ranks("waits", "calls")
    assert waiting.run(25.0) == []
    waiting.move(1)
    assert waiting.run(50.0) == []
    assert len(waiting.run(60.0)) == 1


def test_nothing_is_said_while_one_rank_moves(ranks: Any) -> None:
    waiting = ranks("waits", "calls")
    for second in range(200):
        waiting.move(1)
        assert waiting.run(float(second)) == []
    assert len(waiting.run(233.0)) == 1


def test_a_rank_whose_line_changes_does_not_wait(ranks: Any) -> None:
    evaluating = ranks("calls", "calls")
    for look in range(200):
        evaluating.places = [f"line {look}"] * 2
        assert evaluating.run(look * LOOK) == []


def test_a_rank_that_moves_again_says_so(ranks: Any) -> None:
    slow = ranks("works", "works")
    assert slow.run(35.0) == []
    slow.move(0)
    slow.kinds[0] = "waits"
    for second in range(36, 100):
        slow.move(1)
        assert slow.run(float(second)) == []


def test_ranks_that_are_suspended_together_have_not_waited(ranks: Any) -> None:
    waiting = ranks("waits", "calls")
    waiting.run(28.5)
    waiting.now += 3600.0
    assert waiting.run(waiting.now + 2 * LOOK) == []


def test_steps_of_a_minute_are_one_line_a_block(ranks: Any) -> None:
    slow, texts = ranks("waits", "works"), list[str]()
    for minute in range(1, 10):
        texts += slow.run(60.0 * minute)
        slow.move(0)
        slow.move(1)
    assert len(texts) == 1 and "Nothing is wrong if it takes so long there" in texts[0]
    assert len(slow.run(1000.0)) == 1  # it hangs at last


@pytest.mark.parametrize("kind", ["works", "rests"])
def test_a_rank_that_may_be_slow_only_is_one_line_for_minutes(ranks: Any, kind: str) -> None:
    slow = ranks("waits", kind)
    (text,) = slow.run(450.0)
    assert ("Nothing is wrong if" if kind == "works" else "Either it takes so long there, or rank 0 never") in text
    assert len(slow.run(600.0)) == 1


@pytest.mark.parametrize(
    ("kinds", "count"), [(("works", "rests"), 0), (("rests", "rests"), 0), (("rests", "waits"), 1)]
)
def test_nothing_is_said_where_no_rank_waits(ranks: Any, kinds: tuple[str, ...], count: int) -> None:
    assert len(ranks(*kinds).run(55.0)) == count


def test_ranks_that_read_their_devices_in_different_lines_may_hang(ranks: Any) -> None:
    resting = ranks("rests", "rests")
    resting.places[1] = "at another line"
    assert len(resting.run(32.0)) == 1


@pytest.mark.parametrize("answers_first", [False, True])
def test_a_rank_that_does_not_answer_is_listed(ranks: Any, answers_first: bool) -> None:
    waiting = ranks("waits", "waits", "calls")
    if answers_first:
        waiting.boards[1].ring()
        waiting.run(5.0)
        for rank in range(3):
            waiting.move(rank)
    waiting.silent = {0}
    (text,) = waiting.run(waiting.now + 35.0)
    assert "\n  rank 0: does not answer\n  rank 1: at waits\n  rank 2: at calls\nNo answer from rank 0: " in text


def test_a_foreign_text_forges_no_line(ranks: Any) -> None:
    waiting = ranks("waits", "calls")
    waiting.places[1] = "here\n  rank 7: \x1b[2J" + "x" * 1000
    (text,) = waiting.run(32.0)
    assert len(text.splitlines()) == 4 and "\x1b" not in text and len(text) < 700


def test_many_ranks_ask_the_store_for_little(ranks: Any) -> None:
    many = ranks("waits", *["calls"] * 63)
    many.run(26.0)
    many.store.requests = 0
    (text,) = many.run(45.0)
    assert "ranks 1-63: at calls" in text
    assert many.store.requests < 64 * (4 * 19 + 20)  # each looks for the bell anyway, four times a second


def test_the_list_of_places_is_short(ranks: Any) -> None:
    many = ranks(*["calls"] * 40)
    many.places = [f"line {rank}" for rank in range(40)]
    (text,) = many.run(35.0)
    assert len(text.splitlines()) < 20 and "and 24 more" in text


def test_the_switch(ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOIN_EXPLAIN_WAITS", "0")
    assert ranks("waits", "calls").run(100.0) == []


# -- places ------------------------------------------------------------------------------------------------------------

C10D, MODULE, GUARD = "torch.distributed.distributed_c10d", "torch.nn.modules.module", ("join.failure.guard", "wait")
COMPILER = ("torch._dynamo.convert_frame", "__call__")
PLACES: list[tuple[list[tuple[str, str]], str, str]] = [
    ([(C10D, "barrier"), ("torch.distributed.c10d_logger", "wrapper")], "calls", "in torch.distributed.barrier"),
    ([(C10D, "all_gather"), (C10D, "all_gather_object")], "calls", "in torch.distributed.all_gather_object"),
    (
        [("torch._ops", "__call__"), ("torch.distributed._functional_collectives", "wait_tensor")],
        "calls",
        "wait_tensor",
    ),
    ([(C10D, "broadcast"), ("torch.distributed.optim.zero", "step")], "calls", "in torch.distributed.optim.zero.step"),
    (
        [("torch.autograd.graph", "_engine_run_backward"), ("torch._tensor", "backward")],
        "calls",
        "torch.Tensor.backward",
    ),
    ([("threading", "wait"), GUARD, ("torch._tensor", "backward")], "waits", "waits for the others"),
    ([COMPILER, (MODULE, "_call_impl")], "works", "compiles"),
    ([COMPILER, ("torch.autograd.graph", "_engine_run_backward")], "works", "compiles"),
    ([("torch.nn.modules.linear", "forward"), (MODULE, "_call_impl")], "works", "in the block"),
    ([("torch.cuda", "synchronize")], "rests", "in the block"),
    ([], "rests", "in the block"),
]


@pytest.mark.parametrize(("above", "kind", "doing"), PLACES)
def test_a_place(above: list[tuple[str, str]], kind: str, doing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wait, "stack_of", lambda frame: (above, [module for module, _ in above], "train.py:3"))
    place = wait.placed(Progress(), 0)
    assert (place.kind, place.place.endswith(f"{doing} (train.py:3)")) == (kind, True)


def test_a_line_in_a_package_is_named_with_the_line_that_calls_it() -> None:
    package = dict[str, Any](__name__="tqdm.std")
    exec(compile("def call(fn, *args):\n    return fn(*args)", "/lib/site-packages/tqdm/std.py", "exec"), package)
    place = package["call"](wait.placed, Progress(), threading.get_ident()).place
    assert re.search(r"\(std\.py:2, in call, from test_wait\.py:\d+, in test_a_line_in_a_package", place)


def test_no_frame_outlives_its_reading() -> None:
    def step() -> weakref.ref[Any]:
        tensor = torch.ones(1)
        assert "in step" in wait.placed(Progress(), threading.get_ident()).place
        return weakref.ref(tensor)

    gc.disable()
    assert step()() is None
    gc.enable()


def test_the_switch_reads_no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JOIN_EXPLAIN_WAITS", "0")
    assert wait.placed(Progress(place="begins"), threading.get_ident()) == Progress(place="begins")


@pytest.mark.parametrize("is_enabled", [True, False])
def test_no_garbage_is_collected_while_frames_are_read(is_enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "_current_frames", lambda: {0: gc.isenabled()})
    (gc.enable if is_enabled else gc.disable)()
    try:
        assert (wait.current_frames(), gc.isenabled()) == ({0: False}, is_enabled)
    finally:
        gc.enable()


def test_threads_that_read_frames_do_not_enable_the_collection_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 64 ranks that are threads do it: the process hung, or never collected garbage again."""
    seen, reads = list[bool](), threading.Barrier(4)

    def slow() -> dict[int, Any]:
        seen.append(gc.isenabled())
        with suppress(threading.BrokenBarrierError):
            time.sleep(0.05 * reads.wait(0.1))  # all are here at once, if nothing keeps them apart, and end in turn
        seen.append(gc.isenabled())
        return {}

    monkeypatch.setattr(sys, "_current_frames", slow)
    threads = [threading.Thread(target=wait.current_frames) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    try:
        assert (seen, gc.isenabled()) == ([False] * 8, True)
    finally:
        gc.enable()
