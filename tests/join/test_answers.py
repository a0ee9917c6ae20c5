"""What ranks say in roll calls: every answer is told from every other, and the numbers of bursts go with them."""

from __future__ import annotations

import pytest

from join.answers import Answers


@pytest.mark.parametrize("window", [1, 2, 3, 16, 1000])
def test_answers_do_not_mix(window: int) -> None:
    answers, steps = Answers(window), range(window + 1)
    batches = list(steps)
    failed, left = [[how(step) for step in steps] for how in (answers.failed, answers.left)]
    everything = [*batches, *failed, *left, answers.wrong]
    assert len(set(everything)) == len(everything)
    assert [answer for answer in everything if answers.has_failed(answer)] == failed
    assert [answer for answer in everything if answers.has_left(answer)] == left
    assert not answers.some_end(batches)
    assert answers.all_end([*failed, *left, answers.wrong])
    assert not answers.all_end([window, answers.wrong])
    assert answers.some_end([window, answers.wrong])
    assert answers.failed(window + 5) == failed[-1] and answers.left(window + 5) == left[-1]


@pytest.mark.parametrize("window", [1, 3, 16])
def test_bursts_are_packed_with_them(window: int) -> None:
    answers = Answers(window)
    most = max(bursts for bursts in range(10_000) if answers.unpacked([answers.packed(0, bursts)]) == ([0], [bursts]))
    assert most >= 30 * window
    numbers = (0, 1, most - 1, most, most + 1, 10**9)
    said = [(answer, bursts) for answer in range(answers.wrong + 1) for bursts in numbers]
    packed = [answers.packed(answer, bursts) for answer, bursts in said]
    assert answers.unpacked(packed) == ([answer for answer, _ in said], [min(bursts, most) for _, bursts in said])
    assert max(packed) == answers.largest
