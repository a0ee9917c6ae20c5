"""Loops in lockstep, with thread ranks: who gets what, how they end, and that nobody hangs."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from join import EarlyTerminationError, Join, JoinError, JoinTimeoutError, PeerError, ProtocolError
from join.batch import emptied
from join.collectives import SingleCollective, ThreadCollective, run_threads
from tests.harness import all_or_each, in_test_all
from tests.join.counter import Counter, Leading, blames, group_works
from tests.shorter import using


def batches(rank: int, count: int, fail_at: int | None = None) -> Iterator[torch.Tensor]:
    """Batches of one sample, which is 100 * rank + step."""
    for step in range(count):
        if step == fail_at:
            raise OSError("disk")
        yield torch.tensor([100 * rank + step])


def in_lockstep(collective: ThreadCollective, counts: list[int], **options: Any) -> dict[str, Any]:
    """Run a loop whose body has a collective of its own; return what this rank saw."""
    counter, rank, seen = Counter(collective), collective.rank, []
    with Join([counter]) as join:
        for batch in join.iterate(batches(rank, counts[rank]), **options):
            total = batch.sum().reshape(1)
            collective.all_reduce(total).wait()  # the body's own
            seen.append((batch.tolist(), join.shadowing, join.weight, total.item()))
            counter()
        assert not join.shadowing
        assert join.weight is None
    return {"seen": seen, "pending": [each.tolist() for each in join.pending], "report": join.report, "count": counter}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(1, 4), st.sampled_from(["all", "first"]))
def test_any_counts(counts: list[int], lookahead: int, until: str) -> None:
    steps = max(counts) if until == "all" else min(counts)
    results = run_threads(
        len(counts), lambda collective: in_lockstep(collective, counts, lookahead=lookahead, until=until)
    )
    totals = [sum(100 * rank + step for rank in range(len(counts)) if step < counts[rank]) for step in range(steps)]
    for rank, result in enumerate(results):
        mine = min(counts[rank], steps)
        assert [batch for batch, *_ in result["seen"]] == [[100 * rank + s] for s in range(mine)] + [[]] * (
            steps - mine
        )
        assert [shadowing for _, shadowing, *_ in result["seen"]] == [False] * mine + [True] * (steps - mine)
        assert [weight for *_, weight, _ in result["seen"]] == [1.0] * mine + [0.0] * (steps - mine)
        assert [total for *_, total in result["seen"]] == totals
        ahead = [[100 * rank + step] for step in range(steps, counts[rank])]
        assert result["pending"] == ahead[: len(result["pending"])]
        assert until == "first" or not result["pending"]
        row = result["report"].ranks[rank]
        assert (row.steps, row.shadowed) == (mine, steps - mine)
        windows = -(-steps // lookahead)
        # One on entering the loop, one a window, the last two at its end, and the block's own.
        assert row.headers <= windows + 4
        assert result["report"].even is (until == "first" or len(set(counts)) == 1)
        assert result["count"].last_joiner is (until == "first" or counts[rank] == max(counts))


def test_what_is_read_ahead_is_pending() -> None:
    result = run_threads(2, lambda collective: in_lockstep(collective, [3, 1], until="first"))[0]
    assert [batch for batch, *_ in result["seen"]] == [[0]]
    assert result["pending"] == [[1]]


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("slow", [0, 1])
def test_nobody_waits_for_the_step_that_another_is_in(slow: int, lookahead: int) -> None:
    """The header of a window was launched when the one before it began, and has so long to come through."""
    came = Event()

    def run(collective: ThreadCollective) -> bool:
        there = False
        with Join([Counter(collective)]) as join:
            for step, _ in enumerate(join.iterate(batches(collective.rank, 6 * lookahead), lookahead=lookahead)):
                if collective.rank == slow and step == 2 * lookahead:
                    there = came.wait(5)
                elif collective.rank != slow and step == 4 * lookahead - 1:
                    came.set()
        return there

    assert run_threads(2, run)[slow]


@pytest.mark.parametrize("lookahead", [1, 3])
def test_no_batch_is_lost(lookahead: int) -> None:
    """What was handed out, what is pending and what the iterator still has are all there was."""

    def run(collective: ThreadCollective) -> list[int]:
        loader = batches(collective.rank, [9, 4, 7][collective.rank])
        with Join([Counter(collective)]) as join:
            seen = list(join.iterate(loader, until="first", lookahead=lookahead))
        return [int(batch) for batch in chain(seen, join.pending, loader)]

    assert run_threads(3, run) == [[100 * rank + step for step in range(count)] for rank, count in enumerate([9, 4, 7])]


@pytest.mark.parametrize("dummy", ["last", lambda batch: batch + 1000])
def test_dummies(dummy: Any) -> None:
    results = run_threads(3, lambda collective: in_lockstep(collective, [2, 1, 0], dummy=dummy))
    extra = 0 if dummy == "last" else 1000
    assert [batch for batch, *_ in results[1]["seen"]] == [[100], [100 + extra]]
    assert [batch for batch, *_ in results[2]["seen"]] == [[0 + extra], [0 + extra]]  # rank 0's first


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    label: str


def test_emptied_batches_keep_their_shape() -> None:
    x = torch.ones(4, 3, requires_grad=True)
    batch = {
        "x": x, "scalar": torch.tensor(2.0), "text": ["a"], "pair": Pair(x, 5), "sample": Sample(torch.ones(2), "cat"),
        "user": UserDict(x=torch.ones(3, 1)),
    }  # fmt: skip
    empty = emptied(batch)
    assert empty["x"].shape == (0, 3)
    assert empty["x"].untyped_storage().nbytes() == 0
    assert empty["scalar"] == 2
    assert empty["text"] == ["a"]
    assert empty["pair"].left.shape == (0, 3)
    assert empty["pair"].right == 5
    assert (empty["sample"].x.shape, empty["sample"].label) == ((0,), "cat")
    assert empty["user"]["x"].shape == (0, 1)
    assert batch["user"]["x"].shape == (3, 1)
    assert batch["sample"].x.shape == (2,)


@pytest.mark.parametrize("timeout", [None, 20])
@pytest.mark.parametrize("until", ["all", "first"])
@pytest.mark.parametrize("how", [{}, {"lookahead": 2}, {"lookahead": 3}])
def test_last_step(how: dict[str, Any], until: Any, timeout: float | None) -> None:
    lookahead = how.get("lookahead", 1)

    def run(collective: ThreadCollective) -> list[bool]:
        counter, found = Leading(collective), list[bool]()
        with Join([counter], timeout=timeout) as join:
            assert not join.is_last_step
            for _ in join.iterate(list(batches(collective.rank, 4 + collective.rank)), until, lookahead=lookahead):
                found.append(join.is_last_step)
                counter()
                assert join.is_last_step == found[-1]
            assert not join.is_last_step
        return found

    assert run_threads(3, run) == [[False] * (5 if until == "all" else 3) + [True]] * 3


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_last_step_of_a_block_that_is_not_enabled(count: int, fails: bool) -> None:
    found: list[bool] = []
    with (
        Join([Leading(SingleCollective())], enable=False) as join,
        pytest.raises(OSError, match="disk") if fails else nullcontext(),
    ):
        for _ in join.iterate(batches(0, count + fails, count if fails else None)):
            found.append(join.is_last_step)
    assert not join.is_last_step
    assert found == [False] * (count - 1 + fails) + [True] * (count > 0 and not fails)


class Rows(list[Any]):
    pass


class Padded(tuple[Any, ...]):
    pass


def test_subclasses_of_lists_and_tuples_are_emptied() -> None:
    empty = emptied(Rows([torch.ones(2), Padded((torch.ones(3), "text"))]))
    assert type(empty) is Rows
    assert type(empty[1]) is Padded
    assert (empty[0].shape, empty[1][0].shape, empty[1][1]) == ((0,), (0,), "text")


@pytest.mark.parametrize("dummy", ["empty", "last", lambda batch: batch])
def test_a_body_that_takes_its_batch_apart(dummy: Any) -> None:
    def run(collective: ThreadCollective) -> list[tuple[int, int]]:
        loader = [{"x": torch.ones(2), "y": torch.ones(2)} for _ in range((2, 5, 0)[collective.rank])]
        seen: list[tuple[int, int]] = []
        weight = torch.ones(1, requires_grad=True)
        with Join([Leading(collective)]) as join:
            for batch in join.iterate(loader, dummy=dummy):
                y = batch.pop("y")
                batch["x"] = torch.cat([batch["x"] * weight, torch.ones(1)])
                batch["x"].sum().backward()
                seen.append((len(batch["x"]), len(y)))
        return seen

    full, empty = (3, 2), (1, 0) if dummy == "empty" else (3, 2)
    expected = [[full] * 2 + [empty] * 3, [full] * 5, [empty] * 5]
    assert run_threads(3, run) == expected


class Two(tuple[Any, ...]):
    """A tuple that cannot be built again from its items."""

    def __new__(cls, left: Any, right: Any) -> Two:
        return super().__new__(cls, (left, right))


@pytest.mark.parametrize("dummy", ["empty", "last", lambda two: Two(two[0] * 0, "dummy")])
def test_batches_that_cannot_be_built_again(dummy: Any) -> None:
    """All of them are trained on, and only a dummy needs another one."""

    def run(collective: ThreadCollective, counts: list[int]) -> str:
        loader, seen = [Two(torch.ones(2), "own")] * counts[collective.rank], list[str]()
        try:
            with Join([Leading(collective)]) as join:
                for _, text in join.iterate(loader, dummy=dummy):
                    seen.append(text)
        except JoinError as error:
            return f"{type(error).__name__}: {error}"
        return " ".join(seen)

    assert run_threads(2, lambda collective: run(collective, [2, 2])) == ["own own"] * 2
    one, two = run_threads(2, lambda collective: run(collective, [1, 2]))
    if callable(dummy):
        assert (one, two) == ("own dummy", "own own")
    else:
        assert re.search(
            r"rank 0 cannot make one of its own batch \(TypeError: .* type Two.*J555.*dummy=function.*J067", one
        )
        assert blames(two, 0, one)


def test_a_loader_keeps_its_other_methods_for_itself() -> None:
    class Loader(list[Any]):
        state_dict = load_state_dict = set_epoch = lambda self, *_: {}

    def run(collective: ThreadCollective) -> None:
        with Join([Leading(collective)]) as join:
            batches = join.iterate(Loader([1, 2]))
            assert not {"state_dict", "load_state_dict", "set_epoch"} & set(dir(batches))
            assert list(batches) == [1, 2]

    run_threads(2, run)


def test_a_first_batch_that_cannot_be_sent() -> None:
    def run(collective: ThreadCollective) -> None:
        batch = [torch.ones(2), lambda: None]
        with (
            pytest.raises(JoinError, match=r"the first batch of rank 0 cannot be sent to them"),
            Join([Leading(collective)]) as join,
        ):
            for _ in join.iterate([batch] * (1 - collective.rank), dummy="last"):
                pass

    run_threads(2, run)


def outcome(
    collective: ThreadCollective,
    body: Any,
    loader: Any = None,
    lookahead: int = 1,
    joins: Any = None,
    **options: Any,
) -> str:
    """How a loop over three batches ends whose body calls ``body(step, place)`` after each of its two bursts."""
    first, second = Leading(collective, "first"), Leading(collective, "second")
    text = "fine"
    try:
        with Join([first, second], **options) as join:
            loader = batches(collective.rank, 3) if loader is None else loader
            if joins is not None:
                joins[collective.rank] = join
            for step, _ in enumerate(join.iterate(loader, lookahead=lookahead)):
                first()
                if body(step, "middle") == "break":
                    break
                second()
                if body(step, "end") == "break":
                    break
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    if text.startswith(("fine", "EarlyTerminationError")):
        group_works(collective)
    return text


@pytest.mark.parametrize("where", ["middle", "end"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"lookahead": 2}, {"timeout": 20}])
def test_leaving_together_is_an_orderly_end(options: dict[str, Any], at: int, where: str) -> None:
    def body(step: int, place: str) -> str:
        return "break" if (step, place) == (at, where) else ""

    assert run_threads(3, lambda collective: outcome(collective, body, list(batches(0, 3)), **options)) == ["fine"] * 3


@pytest.mark.parametrize(
    ("options", "fails", "where"), all_or_each(product([{}, {"lookahead": 2}], [False, True], ["middle", "end"]))
)
def test_leaving_together_and_late(options: dict[str, Any], fails: bool, where: str) -> None:
    """However long one of them takes: it saves a checkpoint, say."""

    def run(collective: ThreadCollective) -> str:
        def body(step: int, place: str) -> str:
            if (step, place) != (1, where):
                return ""
            time.sleep(0.4 if collective.rank == 0 else 0.0)
            if fails and collective.rank == 0:
                raise ValueError("enough")
            return "break"

        return outcome(collective, body, list(batches(0, 4)), **options)

    with using(look=0.05):
        zero, *others = run_threads(3, run)
    assert zero == ("ValueError: enough" if fails else "fine")
    for text in others:
        assert blames(text, 0, zero) if fails else text == "fine"


@pytest.mark.parametrize("options", [{}, {"lookahead": 2}, {"timeout": 20}])
def test_the_last_step_may_be_left_by_a_break(options: dict[str, Any]) -> None:
    def run(collective: ThreadCollective) -> str:
        def body(step: int, place: str) -> str:
            return "break" if (collective.rank, step, place) == (1, 3, "end") else ""

        return outcome(collective, body, list(batches(0, 4)), **options)

    assert run_threads(3, run) == ["fine"] * 3


@pytest.mark.parametrize("where", ["middle", "end"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"lookahead": 2}, {"timeout": 20}])
def test_leaving_alone_is_an_error_for_all(options: dict[str, Any], at: int, where: str) -> None:
    def run(collective: ThreadCollective) -> str:
        def body(step: int, place: str) -> str:
            return "break" if (collective.rank, step, place) == (1, at, where) else ""

        return outcome(collective, body, list(batches(0, 4)), **options)

    zero, one, two = run_threads(3, run)
    assert one.startswith(f"ProtocolError: Rank 1 left the loop over join.iterate in step {at + 1}, but rank ")
    assert blames(zero, 1, one) and blames(two, 1, one)


@pytest.mark.parametrize("where", ["middle", "end"])
@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"lookahead": 2}, {"timeout": 20}])
def test_a_body_that_raises(options: dict[str, Any], at: int, where: str) -> None:
    def run(collective: ThreadCollective) -> str:
        def body(step: int, place: str) -> str:
            if (collective.rank, step, place) == (1, at, where):
                raise ValueError("enough")
            return ""

        return outcome(collective, body, list(batches(0, 3)), **options)

    zero, one, two = run_threads(3, run)
    assert one == "ValueError: enough"
    assert blames(zero, 1, one) and blames(two, 1, one)


@pytest.mark.parametrize("where", ["middle", "end"])
@pytest.mark.parametrize("ats", [(0, 0, 0), (1, 1, None), (0, 1, None), (1, 2, None), (0, 1, 2)])
def test_bodies_that_raise(ats: Any, where: str) -> None:
    def run(collective: ThreadCollective) -> str:
        def body(step: int, place: str) -> str:
            if (step, place) == (ats[collective.rank], where):
                raise ValueError("enough")
            return ""

        return outcome(collective, body)

    for at, text in zip(ats, run_threads(3, run), strict=True):
        assert re.match("PeerError: rank [01] failed" if at is None else "ValueError: enough|PeerError: rank", text)


BURSTS = [0, 1, 1]
STEPS = 8


def leaving_out(collective: ThreadCollective, runs: list[int], step: int, lookahead: int) -> str:
    """Rank 1 runs other bursts in a step than all ranks in all others, and goes on; what this rank is told."""
    leading = [Leading(collective, "first"), Leading(collective, "second")]
    text = "fine"
    try:
        with Join(leading) as join:
            for at, _ in enumerate(join.iterate([0] * (STEPS - 4 * collective.rank), lookahead=lookahead)):
                for burst in runs if (collective.rank, at) == (1, step) else BURSTS:
                    leading[burst]()
    except JoinError as error:
        text = f"{type(error).__name__}: {error}"
    return text


@pytest.mark.parametrize("runs", [[], [0, 1]])
@pytest.mark.parametrize(("step", "lookahead"), [(0, 1), (2, 1), (3, 2), (4, 1), (6, 1), (7, 1)])
def test_a_rank_that_leaves_something_out_and_goes_on(runs: list[int], step: int, lookahead: int) -> None:
    """It is told where it waits for a roll call that the others do not come to, at the latest at the loop's end."""
    with using(look=0.05):
        zero, one, two = run_threads(3, lambda collective: leaving_out(collective, runs, step, lookahead))
    assert re.match(
        r"ProtocolError: Rank 1 skipped [\w ]+ in step \d of join.iterate, or in an earlier step, but rank ", one
    )
    assert blames(zero, 1, one) and blames(two, 1, one)


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_rank_that_runs_more(step: int) -> None:
    with using(look=0.05):
        texts = run_threads(3, lambda collective: leaving_out(collective, [*BURSTS, 1], step, lookahead=1))
    for text in texts:
        assert text.startswith(("ProtocolError: Rank ", "PeerError: rank "))
        assert " of join.iterate, or in an earlier step, but rank " in text


def in_own_collectives(collective: ThreadCollective, how: str, slow: float = 0.0) -> str:
    """The body has collectives that no joinable stands for; rank 1 leaves before one, or leaves it out."""
    try:
        with Join([Leading(collective)]) as join:
            for step, _ in enumerate(join.iterate([0] * 4)):
                if collective.rank == 2 and how != "slow behind":
                    time.sleep(slow)
                if (collective.rank, step) == (1, 2) and how == "break":
                    break
                if not ((collective.rank, step) == (1, 2) and how == "leaves out"):
                    collective.barrier()
                if collective.rank == 2 and how == "slow behind":
                    time.sleep(slow)
                if step == 2 and how == "all break":
                    break
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


@pytest.mark.parametrize("how", ["break", "leaves out"])
def test_a_collective_of_the_bodys_own_that_a_rank_does_not_come_to(how: str) -> None:
    with using(still=0.5):
        zero, one, two = run_threads(3, lambda collective: in_own_collectives(collective, how))
    assert one.startswith("ProtocolError: Rank 1 ")
    assert "skipped a collective of the loop body in step" in one or how == "break"
    assert blames(zero, 1, one) and blames(two, 1, one)


def leaving_out_one_of_many(collective: ThreadCollective, lookahead: int) -> tuple[str, int]:
    step = 0
    try:
        with Join([Leading(collective)]) as join:
            for step, _ in enumerate(join.iterate([0] * 60, lookahead=lookahead)):
                if (collective.rank, step) != (1, 2):
                    collective.barrier()
    except JoinError as error:
        return f"{type(error).__name__}: {error}", step
    return "fine", step


@pytest.mark.parametrize("lookahead", [1, 4])
def test_a_collective_that_pairs_with_one_of_a_later_step(lookahead: int) -> None:
    """No rank waits, since each collective meets the next one: the roll calls say how many each rank has started."""
    with using(still=0.5):
        (zero, at), (one, _), (two, _) = run_threads(3, lambda each: leaving_out_one_of_many(each, lookahead))
    assert one.startswith("ProtocolError: Rank 1 skipped a collective of the loop body in step")
    assert blames(zero, 1, one) and blames(two, 1, one)
    assert at <= 2 + 3 * lookahead


@in_test_all
@pytest.mark.parametrize("how", ["none", "all break", "slow behind"])
def test_nobody_who_waits_for_a_slow_rank_is_told_anything(how: str) -> None:
    with using(still=0.3, look=0.05):
        assert run_threads(3, lambda collective: in_own_collectives(collective, how, slow=0.7)) == ["fine"] * 3


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_loader_that_raises(at: int) -> None:
    def run(collective: ThreadCollective) -> str:
        fail_at = at if collective.rank == 1 else None
        return outcome(collective, lambda step, place: "", batches(collective.rank, 3, fail_at))

    zero, one, two = run_threads(3, run)
    assert one == "OSError: disk"
    assert blames(zero, 1, one) and blames(two, 1, one)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_interrupt_in_a_loader(at: int) -> None:
    def interrupted(rank: int) -> Iterator[torch.Tensor]:
        for step in range(3):
            if (rank, step) == (1, at):
                raise KeyboardInterrupt
            yield torch.tensor([step])

    def run(collective: ThreadCollective) -> str:
        try:
            return outcome(collective, lambda step, place: "", interrupted(collective.rank))
        except KeyboardInterrupt:
            return "interrupted"

    zero, one, two = run_threads(3, run)
    assert one == "interrupted"
    assert blames(zero, 1, "KeyboardInterrupt") and blames(two, 1, "KeyboardInterrupt")


class Refuses(torch.nn.Module):
    """A module that takes nothing."""

    def forward(self, x: Any) -> Any:
        raise Enough("of it")


class Enough(Exception):
    """By which a body ends its loop."""


@pytest.mark.parametrize("error", [lambda: torch.ones(0).max(), lambda: Refuses()(0)])
@pytest.mark.parametrize("is_empty", [True, False])
def test_a_body_that_raises_on_an_empty_batch(error: Any, is_empty: bool) -> None:
    """Its exception stays what it is, and a note says what the batch was."""

    def run(collective: ThreadCollective) -> str:
        with pytest.raises((Enough, RuntimeError)) as caught, Join([Leading(collective)]) as join:
            for step, _ in enumerate(join.iterate([0] * (3 - collective.rank * is_empty))):
                if (collective.rank, step) == (1, 2):
                    error()
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    for text in run_threads(2, run):
        assert ("was out of data and got a dummy batch" in text) is (is_empty and sys.version_info >= (3, 11))


def test_a_loop_that_is_left_inside_a_window_ends_the_block() -> None:
    def run(collective: ThreadCollective) -> None:
        join = Join([Leading(collective)]).open()
        for _ in join.iterate([0] * 4, window=2):
            break
        with pytest.raises(JoinError, match="inside an accumulation window"):
            list(join.iterate([0]))
        with pytest.raises(JoinError, match="has already ended") as caught:
            list(join.iterate([0]))
        join.close(caught.value)

    run_threads(2, run)


def test_no_step_is_the_last_one_after_a_loop_that_was_left() -> None:
    def run(collective: ThreadCollective) -> list[bool]:
        with Join([Leading(collective)]) as join:
            for _ in join.iterate([0]):
                in_loop = join.is_last_step
                break
            return [in_loop, join.is_last_step]

    assert run_threads(2, run) == [[True, False]] * 2


class Asking(list[int]):
    """Batches that call a function whenever one is read."""

    ask: Callable[[], None]

    def __iter__(self) -> Iterator[int]:
        self.ask()
        for each in super().__iter__():
            yield each
            self.ask()


@pytest.mark.parametrize("window", [1, 2])
def test_no_step_is_current_while_a_loop_reads(window: int) -> None:
    """Once its length is known, and in the loader, between the steps of other ranks and of this one."""

    def run(collective: ThreadCollective) -> tuple[int, set[str]]:
        join, found = Join([Leading(collective)]), list[str]()

        def ask() -> None:
            assert join.weight is None
            assert (join.shadowing, join.ends_window, join.is_last_step) == (False, True, False)
            calls = partial(join.scale, 1.0), partial(join.mean, 1.0), lambda: join.total_weight
            for call in (*calls, partial(setattr, join, "weight", 2.0)):
                with pytest.raises(JoinError) as caught:
                    call()
                found.append(str(caught.value)[-5:-1])

        loader = Asking(range(3 * collective.rank))
        loader.ask = ask
        with join:
            batches = join.iterate(loader, weigh=lambda _: 3.0, window=window)
            assert len(batches) == 3
            ask()
            for _ in batches:
                assert join.weight == join.total_weight * collective.rank == 3.0 * collective.rank
        return len(found), set(found)

    assert run_threads(2, run) == [(4 * calls, {"J055", "J468"}) for calls in (2, 5)]


def test_early_termination() -> None:
    def run(collective: ThreadCollective) -> str:
        loader = batches(collective.rank, [3, 2, 5][collective.rank])
        return outcome(collective, lambda step, place: "", loader, throw_on_early_termination=True)

    others = "EarlyTerminationError: Detected at least one rank that exhausted inputs. Throwing across all ranks."
    assert run_threads(3, run) == [others, "EarlyTerminationError: Rank 1 exhausted all inputs.", others]
    assert issubclass(EarlyTerminationError, JoinError)


def test_a_rank_that_does_not_iterate() -> None:
    def run(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises((ProtocolError, PeerError)) as caught, Join([counter]) as join:
            if collective.rank != 1:
                for _ in join.iterate(batches(0, 2)):
                    counter()
            else:
                counter()
        return f"{type(caught.value).__name__}: {caught.value}"

    texts = run_threads(3, run)
    assert any(text.startswith("ProtocolError: ") for text in texts)
    assert all("3 active ranks announced different bursts: 1 x Counter, 2 x join.iterate" in text for text in texts)


def test_a_rank_that_has_left_the_block() -> None:
    def run(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises(JoinError) as caught, Join([counter]) as join:
            if collective.rank != 1:
                for _ in join.iterate(batches(0, 2)):
                    counter()
        return f"{type(caught.value).__name__}: {caught.value}"

    first, second, third = run_threads(3, run)
    begun = "ProtocolError: 2 ranks began a loop over join.iterate after 1 ranks had left the block."
    assert first == third == f"{begun} Run the loop on all ranks, including ranks without batches. [J091]"
    assert second.startswith("PeerError: rank ")
    assert first in second


@pytest.mark.parametrize(("place", "doing"), [("begin", "announced Counter in step 2 of"), ("end", "reached step")])
def test_a_rank_that_sleeps(place: str, doing: str) -> None:
    is_told = threading.Barrier(2, timeout=20)

    def run(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        try:
            with Join([counter], timeout=0.5) as join:
                for step, _ in enumerate(join.iterate(batches(0, 4))):
                    if collective.rank == step == 1 and place == "begin":
                        is_told.wait()
                    counter()
                    if collective.rank == step == 1 and place == "end":
                        is_told.wait()
        except JoinTimeoutError as error:
            if collective.rank == 0:
                is_told.wait()
            return str(error)
        return "fine"

    texts = run_threads(2, run)
    assert texts[0].startswith("Ranks [1] announced no collective within timeout=0.5 s")
    assert f"rank 0 {doing}" in texts[0]
    assert texts[1].startswith(f"rank 0 failed: JoinTimeoutError: {texts[0]}")


def test_two_loops_and_a_plain_one_in_one_block() -> None:
    def run(collective: ThreadCollective) -> tuple[int, int]:
        counter, rank = Counter(collective), collective.rank
        with Join([counter]) as join:
            for _ in join.iterate(batches(rank, rank + 1)):
                counter()
            for _ in join.iterate(batches(rank, 2)):
                counter()
                if join.shadowing:
                    raise AssertionError
                break
            for _ in range(rank):
                counter()
        return counter.total, join.report.ranks[rank].steps

    assert run_threads(3, run) == [(3 * 3 + 3 + 3, 1 + 1), (15, 2 + 1), (15, 3 + 1)]


def test_an_iterator_that_is_kept_after_a_break() -> None:
    def run(collective: ThreadCollective) -> list[Any]:
        counter, seen = Counter(collective), list[Any]()
        with Join([counter]) as join:
            for epoch in range(2):
                loop = join.iterate(batches(collective.rank, 4 - 3 * collective.rank))  # drops the one before
                for _ in loop:
                    counter()
                    seen.append((epoch, join.shadowing))
                    if epoch == 0:
                        break
        return seen

    expected = [(0, False)] + [(1, False)] * 4, [(0, False), (1, False)] + [(1, True)] * 3
    assert tuple(run_threads(2, run)) == expected


@pytest.mark.parametrize("first", [list, len, lambda loop: next(iter(loop))])
def test_a_loop_is_iterated_once(first: Callable[[Any], Any]) -> None:
    def run(collective: ThreadCollective) -> str:
        with Join([Counter(collective)]) as join:
            loop = join.iterate(list(batches(collective.rank, 2 - 2 * collective.rank)))
            first(loop)
            try:
                return f"{len(list(loop))} steps"
            except JoinError as error:
                return str(error)

    told = "iterated a second time" if first is not len else "2 steps"
    assert all(told in text for text in run_threads(2, run))


@pytest.mark.parametrize("in_a_block_of_its_own", [False, True])
def test_loops_in_loops_are_refused(in_a_block_of_its_own: bool) -> None:
    def run(collective: ThreadCollective) -> str:
        counter, other = Counter(collective), Counter(collective)
        with pytest.raises(JoinError) as caught, Join([counter]) as join:
            for _ in join.iterate(batches(collective.rank, 3 - collective.rank)):
                counter()
                with Join([other]) if in_a_block_of_its_own else nullcontext(join) as inner:
                    for _ in inner.iterate(batches(collective.rank, 2 - collective.rank)):
                        (other if in_a_block_of_its_own else counter)()
        return str(caught.value)

    for text in run_threads(2, run):
        assert "A loop over join.iterate ran inside another one" in text


@pytest.mark.parametrize("breaks", [False, True])
def test_a_loader_is_let_go_with_its_loop(breaks: bool) -> None:
    def run(collective: ThreadCollective) -> bool:
        let_go = []

        def loader() -> Iterator[torch.Tensor]:
            try:
                yield from batches(collective.rank, 4 - collective.rank)
            finally:
                let_go.append(True)  # worker processes end, say

        counter = Counter(collective)
        with Join([counter]) as join:
            for _ in join.iterate(loader(), until="first"):
                counter()
                if breaks:
                    break
        return bool(let_go)

    assert run_threads(2, run) == [True, True]


def test_disabled() -> None:
    def run(collective: ThreadCollective) -> list[int]:
        with Join([Counter(collective)], enable=False) as join:
            return [int(batch) for batch in join.iterate(batches(0, collective.rank))]

    assert run_threads(2, run) == [[], [0]]


def test_a_disabled_loop_keeps_its_length_and_the_attributes_of_its_loader() -> None:
    loader = Rows([1, 2])
    with Join([Leading(SingleCollective())], enable=False) as join:
        loop = join.iterate(loader)
        assert (len(loop), list(loop)) == (2, [1, 2])
        assert (len(loop), loop.index(2)) == (2, 1)
        with pytest.raises(TypeError, match="has none"):
            len(join.iterate(batches(0, 1)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"loader": 5}, "loader=5 cannot be iterated. Pass a DataLoader"),
        ({"until": "last"}, "until='last' is not a valid value. Pass 'all' to loop"),
        ({"dummy": "none"}, "dummy='none' is not a valid value. Pass 'empty', 'last', or a function"),
        ({"lookahead": -1}, "lookahead=-1 is not a finite number of at least 0"),
        ({"lookahead": 1.5}, "lookahead=1.5 is not a whole number"),
        ({"lookahead": True}, "lookahead=True is not a whole number"),
        ({"window": True}, "window=True is not a whole number"),
    ],
)
def test_bad_arguments(options: Any, text: str) -> None:
    def run(collective: ThreadCollective) -> str:
        with pytest.raises((TypeError, ValueError)) as caught, Join([Counter(collective)]) as join:
            join.iterate(**{"loader": [], **options})
        return str(caught.value)

    assert all(told.startswith(text) for told in run_threads(2, run))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([{"lookahead": 2}, {}], ["lookahead=2", "lookahead=1"]),
        (
            [{"until": "first", "dummy": "last"}, {"until": "all"}],
            ["until=first, dummy=last", "until=all, dummy=empty"],
        ),
    ],
)
def test_arguments_that_differ(options: list[dict[str, Any]], told: list[str]) -> None:
    def run(collective: ThreadCollective) -> str:
        counter = Counter(collective)
        with pytest.raises(ProtocolError) as caught, Join([counter]) as join:
            for _ in join.iterate(batches(collective.rank, 3 - collective.rank), **options[collective.rank]):
                counter()
        return str(caught.value)

    for text in run_threads(2, run):
        assert text.startswith("The ranks entered join.iterate with different objects or arguments")
        assert f"(ranks [0]: {told[0]}; ranks [1]: {told[1]})." in text


def test_outside() -> None:
    def run(collective: ThreadCollective) -> None:
        join = Join([Counter(collective)])
        with pytest.raises(JoinError, match="called outside its block"):
            join.iterate([])

    run_threads(1, run)


def test_a_block_that_is_over() -> None:
    def run(collective: ThreadCollective) -> None:
        with Join([Counter(collective)]) as join:
            pass
        with pytest.raises(JoinError, match=r"join.iterate was called outside its block"):
            join.iterate([])

    run_threads(1, run)


class Own(Counter):
    """Remembers from whom it was to take over what each rank has for itself."""

    sources: list[int]

    def synchronise_own(self, source: int) -> None:
        self.sources = [*getattr(self, "sources", []), source]


@pytest.mark.parametrize("steps_after", [0, 2])
def test_what_a_loop_leaves_to_the_rest_of_its_block(steps_after: int) -> None:
    """A follower that a step has left out may come in the next; who had data in the loop matters at its end only."""

    def run(collective: ThreadCollective) -> Any:
        first, follower = Own(collective), Own(collective)
        with Join([first, follower]) as join:
            for _ in join.iterate(batches(collective.rank, 2 + collective.rank)):
                first()  # the follower is left out
            for _ in range(steps_after):
                first()
                follower()
        return first.sources, follower.sources, follower.last_joiner, join.report.ranks[0].idle

    (*zero, idle), (*one, _) = run_threads(2, run)
    at_the_end = 0 if steps_after else 1
    assert zero == [[1, at_the_end], [1, at_the_end], steps_after > 0]
    assert one == [[1, at_the_end], [1, at_the_end], True]
    assert idle < 10


def test_waiting_for_others_to_begin_is_not_idle() -> None:
    def run(collective: ThreadCollective) -> float:
        counter = Counter(collective)
        with Join([counter]) as join:
            time.sleep(0.5 * collective.rank)
            for _ in join.iterate(batches(collective.rank, 2)):
                counter()
        return join.report.ranks[0].idle

    assert max(run_threads(2, run)) < 0.4


def log_every(loader: Any, seen: list[str]) -> Iterator[Any]:
    """As that of the MetricLogger of torchvision's references, DETR, DINO and MAE."""
    for step, batch in enumerate(loader):
        yield batch
        seen.append(f"logged {step + 1}/{len(loader)}")


def test_a_logger_around_the_loop_and_not_inside() -> None:
    counts = [3, 1, 0]

    def run(collective: ThreadCollective) -> list[str]:
        seen: list[str] = []
        data = [torch.ones(2)] * counts[collective.rank]
        with Join([Counter(collective)]) as join:
            with pytest.raises(TypeError, match=r"log_every\(...\) would log each batch before the loop body"):
                join.iterate(log_every(data, seen))
            for step, _ in enumerate(log_every(join.iterate(data), seen)):
                seen.append(f"ran {step + 1}")
        return seen

    expected = [text for step in (1, 2, 3) for text in (f"ran {step}", f"logged {step}/3")]
    assert run_threads(3, run) == [expected] * 3


def test_loops_that_are_made_before_the_first_begins() -> None:
    def run(collective: ThreadCollective) -> tuple[list[bool], list[bool], list[Any]]:
        rank = collective.rank
        with Join([Leading(collective)]) as join:
            train, valid = join.iterate(batches(rank, 3 - rank), until="first"), join.iterate(range(2))
            is_last = [join.is_last_step for _ in train]
            pending = join.pending
            return is_last, [join.is_last_step for _ in valid], pending

    for rank, found in enumerate(run_threads(2, run)):
        assert found == ([False, True], [False, True], list(batches(rank, 3))[2:] if rank == 0 else [])


@pytest.mark.parametrize("enable", [True, False])
def test_arguments_of_loops_that_are_made_before_the_first_begins(enable: bool) -> None:
    def run(collective: ThreadCollective) -> list[Any]:
        with Join([Leading(collective)], enable=enable) as join:
            loops = join.iterate([1.0, 2.0, 3.0], weigh=float, window=2), join.iterate([5.0], weigh=lambda _: 7)
            return [(join.weight, join.ends_window, join.is_last_step) for loop in loops for _ in loop]

    assert run_threads(2, run) == [[(1.0, False, False), (2.0, True, False), (3.0, True, True), (7.0, True, True)]] * 2


def test_a_loop_that_begins_after_its_block() -> None:
    def run(collective: ThreadCollective) -> None:
        join = Join([Leading(collective)])
        with join:
            loop = join.iterate([0])
        for again in (False, True):
            with join if again else nullcontext(), pytest.raises(JoinError, match="J055"):
                len(loop)

    run_threads(2, run)
