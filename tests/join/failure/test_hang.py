"""Each row of the table in ``docs/hang.md``: where ranks wait for each other, one of them says where all are."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator

import pytest
from torch.nn.parallel import DistributedDataParallel

from join import JoinTimeoutError
from tests import hangs
from tests.ending import Ending, Running
from tests.explained import ends_once_explained
from tests.harness import cases_that_run, in_test_all
from tests.training import build

AT_THE_END = r"waits for the others at the end of the block \(hangs\.py:\d+, in \w+\)"
HANGS: dict[Callable[..., None], str] = {
    hangs.last_steps: rf"""
  rank 0: out of data, {AT_THE_END}
  ranks 1-3: in torch\.Tensor\.backward \(hangs\.py:\d+, in train\)
Either it takes so long there, or rank 0 never calls the collectives of this backward\. In the second""",
    hangs.metric: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1-3: in torch\.distributed\.all_reduce \(hangs\.py:\d+, in log_loss\)
Rank 0 never calls this all_reduce\. Call it after the block, or loop over join\.iterate\. Docs: "My job""",
    hangs.barrier: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1-3: in torch\.distributed\.barrier \(hangs\.py:\d+, in barrier\)
Rank 0 never calls this barrier""",
    hangs.gather: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1-3: in torch\.distributed\.all_gather_object \(hangs\.py:\d+, in gather\)
Rank 0 never calls this all_gather_object""",
    hangs.evaluation: rf"""
  rank 0: in torch\.distributed\.all_reduce \(hangs\.py:\d+, in log_loss\)
  ranks 1-3: out of data since step 2, {AT_THE_END}
Ranks 1-3 never call this all_reduce""",
    hangs.branches: r"""
  ranks 0-1: in step 1 of join\.iterate, in torch\.distributed\.all_reduce \(hangs\.py:\d+, in branches\)
  ranks 2-3: in step 1 of join\.iterate, in torch\.distributed\.broadcast \(hangs\.py:\d+, in branches\)
The ranks wait for each other\. Run the same collectives in the same order on all ranks\.""",
    hangs.leaves: r"""
  ranks 0, 2-3: in step 2 of join\.iterate, .* \(hangs\.py:\d+, in train\)
  rank 1: left join\.iterate in step 2, in torch\.distributed\.barrier \(hangs\.py:\d+, in leaves\)
""",
    hangs.works: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1, 3: waits for the others \(hangs\.py:\d+, in train\)
  rank 2: in the block \(hangs\.py:\d+, in works\)
Either it takes so long there, or ranks 0-1, 3 never call a collective that was started there or earlier\. In the""",
    hangs.loader: rf"""
  rank 0: out of data since step 1, {AT_THE_END}
  ranks 1, 3: waits for the others \(hangs\.py:\d+, in loader\)
  rank 2: reads its next batch \(explained\.py:\d+, in until_explained\)
The other ranks wait for rank 2\. Nothing is wrong""",
    hangs.loader_of_iterate: r"""
  ranks 0-1, 3: in step 1 of join\.iterate, in torch\.Tensor\.backward \(hangs\.py:\d+, in loader_of_iterate\)
  rank 2: begins join\.iterate, reads its next batch \(explained\.py:\d+, in until_explained\)
The other ranks wait for rank 2\. Nothing is wrong""",
    hangs.entering: r"""
  ranks 0, 2-3: entered Join, waits for the others \(hangs\.py:\d+, in entering\)
  rank 1: does not answer
No answer from rank 1: a rank that does not answer has not entered the block""",
    hangs.leaving: r"""
  ranks 0, 2-3: has left the block
  rank 1: out of data, waits for the others at the end of the block, in torch\.distributed\.barrier \(hangs.*post_hook\)
Ranks 0, 2-3 never call this barrier""",
}


def hang(rank: int, loop: Callable[..., None]) -> None:
    with ends_once_explained():
        loop(rank, DistributedDataParallel(build("mlp")))


Hang = tuple[Callable[..., None], bool]
OVER_GROUP = hangs.metric, hangs.entering, hangs.branches
CASES: list[Hang] = [(loop, False) for loop in HANGS] + [(loop, True) for loop in OVER_GROUP]


@pytest.fixture(scope="module")
def started(request: pytest.FixtureRequest, ending: Ending) -> Iterator[Callable[[Hang], Running]]:
    """Several at once: most of what they do is to wait."""
    running, cases = dict[Hang, Running](), cases_that_run(request, "case")

    def start(case: Hang) -> Running:
        for each in cases[cases.index(case) :][:3]:
            if each not in running:
                running[each] = ending.start(hang, each[0], ranks=4, over_group=each[1], tidies=False, limit=50)
        return running.pop(case)

    yield start
    for each in running.values():
        each.ends()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}{' over the group' if case[1] else ''}")
def test_a_wait_explains_itself(started: Callable[[Hang], Running], case: Hang) -> None:
    ends = started(case).ends()
    text = "".join(end.stderr for end in ends)
    assert [end.code for end in ends] == [0] * 4, text
    assert text.count("join: no rank has moved") == 1, text
    assert re.search(r"join: no rank has moved for \d+ s\." + HANGS[case[0]], text), text


def times_out(rank: int) -> str:
    with pytest.raises(JoinTimeoutError) as caught:
        hangs.metric(rank, DistributedDataParallel(build("mlp")), timeout=1.5)
    return str(caught.value)


@in_test_all
@pytest.mark.parametrize("over_group", [False, True])
def test_an_error_has_the_same_lines(ending: Ending, over_group: bool) -> None:
    for text in ending.run(times_out, ranks=4, over_group=over_group):
        assert re.search(HANGS[hangs.metric].split("Rank 0")[0].rstrip(), text), text


def aborts(rank: int) -> None:
    hangs.sizes(rank, DistributedDataParallel(build("mlp")))


def test_an_abort_of_gloo_has_the_line_of_each_rank(ending: Ending) -> None:
    ends = ending.ends(aborts, ranks=4, tidies=False)
    aborted = [end for end in ends if end.code == -signal.SIGABRT]
    assert aborted and all("Received data size doesn't match expected size" in end.text for end in aborted)
    for end in ends:
        assert re.search(r'hangs\.py", line \d+,? in log_loss\n', end.text), end.text
        assert end in aborted or re.search(r"PeerError: ranks? .*PYTHONFAULTHANDLER=1.*\[J064\]", end.error), end.text
