"""Messages, with thread ranks: equal ones are one sum, and of ranks in different places each learns what others do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from join import Join, JoinError, PeerError, ProtocolError
from join.collectives import ThreadCollective, run_threads
from join.protocol.messages import Messages
from tests.join.counter import Leading


def in_block(say: Callable[[Messages, int], object], ranks: int = 3) -> list[object]:
    """Return what ``say(messages, rank)`` returns in a block on each rank, or the text of the error that it raises."""

    def run(collective: ThreadCollective) -> object:
        with Join([Leading(collective, "any")]) as join:
            try:
                return say(join.channel.messages, collective.rank)
            except ProtocolError as error:
                return str(error)

    return run_threads(ranks, run)


def test_votes_are_counted() -> None:
    def say(messages: Messages, rank: int) -> Sequence[object]:
        answer = messages.check(messages.start("voted", ["the same"], vote=rank > 0, first=rank == 2))
        return answer.votes, answer.first, messages.gather_numbers(-rank)

    assert in_block(say) == [(2, True, [0, -1, -2])] * 3


@pytest.mark.parametrize(
    ("parts", "values", "text"),
    [
        (["a"], {}, "ranks [0, 2]: nothing more; ranks [1]: 1). Pass the same objects"),
        ([], {"rate": 0.1}, "the rate of Adam is 0.1 on rank 0, 1.1 on rank 1, 0.1 on rank 2. Step optimizers"),
    ],
)
def test_all_ranks_raise_the_same_if_one_says_something_else(
    parts: list[str], values: dict[str, float], text: str
) -> None:
    def say(messages: Messages, rank: int) -> None:
        own = [*parts, "1"] if parts and rank == 1 else parts
        held = {name: value + (rank == 1) for name, value in values.items()}
        messages.check(messages.start("compared", own, [("Adam", held)]))

    errors = in_block(say)
    assert len(set(errors)) == 1 and text in str(errors[0])


def test_values_that_differ_by_rounding_are_equal() -> None:
    def say(messages: Messages, rank: int) -> bool:
        return messages.check(messages.start("compared", values=[("Adam", {"rate": 1 + rank * 1e-12})])).is_same

    assert in_block(say) == [False] * 3  # and no error


def test_ranks_in_different_places_name_them() -> None:
    def run(collective: ThreadCollective) -> str:
        outer, inner = Leading(collective, "outer"), Leading(collective, "inner")
        with pytest.raises((ProtocolError, PeerError)) as caught, Join([outer]):
            outer()
            if collective.rank:
                with Join([inner]):
                    inner()
        return str(caught.value)

    errors = run_threads(2, run)
    assert all("rank 0 is out of data" in text and "rank 1 entered Join" in text for text in errors), errors
    assert any("[J810]" in text for text in errors)


def test_two_messages_that_are_no_headers_do_not_belong_together() -> None:
    def run(collective: ThreadCollective) -> str:
        outer, inner = Leading(collective, "outer"), Leading(collective, "inner")
        with pytest.raises(JoinError) as caught, Join([outer]) as join:
            for _ in join.iterate([0, 0]):
                if collective.rank:
                    with Join([inner]):
                        inner()
        return str(caught.value)

    errors = run_threads(2, run)
    assert all("of join.iterate; rank 1 entered Join" in text for text in errors), errors


def test_ranks_that_compare_different_things_are_in_different_places() -> None:
    """Both await their message, and so both come to the rows."""

    def run(collective: ThreadCollective) -> str:
        with pytest.raises(JoinError) as caught, Join([Leading(collective, "any")]) as join:
            messages = join.channel.messages
            messages.check(messages.start("compared" if collective.rank else "counted"))
        return str(caught.value)

    assert all("[J810]" in text for text in run_threads(2, run))
