"""What torch's ``Join`` lets pass and this one does not, and the way out, which both take; docs/convert.md tells it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.dropin.counter import counter_class
from tests.dropin.either import OURS, TORCHS, either, run
from tests.harness import Pool
from tests.training import batch, build


def counts_local_steps(rank: int, library: Any, first: bool) -> int:
    ddp, counter = DistributedDataParallel(build("mlp")), counter_class(library)()
    with library.Join([counter, ddp] if first else [ddp, counter]):
        for step in range([0, 4, 2][rank]):
            if first:
                counter()
            with torch.enable_grad() if step % 2 else ddp.no_sync():
                ddp(batch(rank, 0, step)[0]).sum().backward()
            if not first:
                counter()
    return counter.total


@either()
def test_one_that_is_called_at_local_steps_comes_first(pool: Pool, library: str) -> None:
    assert run(pool, library, counts_local_steps, True) == [6, 6, 6]


def has_a_post_hook_only(rank: int, library: Any, says: bool) -> list[Any]:
    counters = [counter_class(library)() for _ in range(2)]
    counters[1].reduce = lambda *_: 0
    if says:
        type(counters[1]).communicates = False
    with library.Join(counters):
        for _ in range([0, 3, 2][rank]):
            counters[0]()
    return [counters[0].total, counters[1].last_joiner]


@either()
def test_one_without_collectives_in_the_loop_says_so(pool: Pool, library: str) -> None:
    assert run(pool, library, has_a_post_hook_only, True) == [[5, False], [5, True], [5, False]]


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (counts_local_steps, "notified, but the joinable that it follows in the list had announced no burst"),
        (has_a_post_hook_only, "If it has no collectives in the loop, set communicates = False"),
    ],
)
def test_without_the_way_out(pool: Pool, fn: Any, told: str) -> None:
    run(pool, TORCHS, fn, False)
    with pytest.raises(AssertionError, match=f"JoinError: .*{told}"):
        run(pool, OURS, fn, False)


def when_hooks_are_made(rank: int, library: Any) -> list[dict[str, Any]]:
    counter = counter_class(library)()
    join = library.Join([counter], most=True)
    seen = [counter.keywords]
    with join:
        seen.append(counter.keywords)
    return seen


@pytest.mark.parametrize(("library", "built"), [(OURS, {}), (TORCHS, {"most": True})])
def test_hooks_are_made_on_entering(pool: Pool, library: str, built: dict[str, Any]) -> None:
    assert run(pool, library, when_hooks_are_made) == [[built, {"most": True}]] * 3


def unknown_keyword(rank: int) -> None:
    with pytest.raises(TypeError, match="divide_by_inital_world_size=False is not a keyword"):
        Join([DistributedDataParallel(build("mlp"))], divide_by_inital_world_size=False)


def test_a_keyword_that_nobody_takes_is_an_error(pool: Pool) -> None:
    pool.run(unknown_keyword, ranks=2)
