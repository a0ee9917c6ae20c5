"""``join.mean``, ``joinables.Mean`` and ``joinables.steps``: numbers over all ranks, of which one has no data."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError, ProtocolError
from join.collectives import collective_of
from joinables import Mean, steps
from tests.harness import Pool
from tests.join.counter import Counter

COUNTS = 3, 0, 2
NAN = float("nan")
STEPS = [[10.0 * rank + step for rank, count in enumerate(COUNTS) if step < count] for step in range(max(COUNTS))]
"""The values of the ranks with data, for each step."""


def values_of(rank: int) -> list[torch.Tensor]:
    return [torch.tensor([10.0 * rank + step]) for step in range(COUNTS[rank])]


def mean_of_steps(rank: int, options: dict[str, Any]) -> list[Any]:
    found: list[Any] = []
    with Join([], process_group=None, **options) as join:
        for batch in join.iterate(values_of(rank), weigh=lambda batch: 1.0 + batch.item()):
            value = NAN if join.shadowing else batch.item()  # a loss of a dummy is usually NaN
            number = join.mean(value, weight=1)
            of_dict = join.mean({"v": torch.tensor([value, 2.0]), "n": value, "i": torch.tensor(3)})
            half = join.mean(torch.tensor(value, dtype=torch.float16), torch.tensor(1 + len(found)))
            found.append((number, of_dict["v"].tolist(), of_dict["n"], of_dict["i"].item(), half.dtype, half.item()))
    return found


def test_mean_of_a_step(pool: Pool) -> None:
    first, *others = pool.run(mean_of_steps, {}, ranks=len(COUNTS))
    assert others == [first] * len(others)
    for values, (number, (vector, two), in_dict, whole, dtype, half) in zip(STEPS, first, strict=True):
        weighted = sum(value * (1 + value) for value in values) / sum(1 + value for value in values)
        assert (number, two, whole, dtype) == (sum(values) / len(values), 2.0, 3.0, torch.float16)
        assert in_dict == pytest.approx(weighted) and vector == pytest.approx(weighted) and half == number


UNLIKE: dict[str, tuple[Any, Any, str]] = {
    "a key": ({"a": 1.0, "b": 2.0}, {"a": 1.0}, "rank 0: ['a'] [], ['b'] []; rank 1: ['a'] []; rank 2: ['a'] [], "),
    "a small shape": (torch.ones(3), torch.ones(0), "rank 0: [3]; rank 1: [0]; rank 2: [3]"),
    "a large shape": (torch.ones(50), torch.ones(70), "rank 0: [50]; rank 1: [70]; rank 2: [50]"),
    "more keys than the head": (dict.fromkeys(map(str, range(30)), 1.0), {}, "; rank 1: nothing; rank 2: "),
}


def mean_of_unlike(rank: int, own: Any, of_dummies: Any) -> str:
    with pytest.raises(ProtocolError) as caught, Join([], process_group=None) as join:
        for _ in join.iterate(values_of(rank)):
            join.mean(of_dummies if join.shadowing else own)
    return str(caught.value)


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_values_are_an_error_on_all_ranks(pool: Pool, name: str) -> None:
    own, of_dummies, told = UNLIKE[name]
    for text in pool.run(mean_of_unlike, own, of_dummies):
        assert told in text and text.endswith("[J740]"), text


def mean_in_any_order(rank: int) -> dict[str, Any]:
    with Join([], process_group=None) as join:
        for _ in join.iterate(values_of(rank)):
            own = {"b": 2.0, "a": {"z": torch.ones(20), "y": 1.0}}
            mean = join.mean(own if rank else {"a": dict(reversed(own["a"].items())), "b": own["b"]})
    return mean


def test_a_dict_has_its_own_order_on_each_rank(pool: Pool) -> None:
    for mean in pool.run(mean_in_any_order):
        assert (mean["b"], mean["a"]["y"], mean["a"]["z"].tolist()) == (2.0, 1.0, [1.0] * 20)


def totals(rank: int, options: dict[str, Any], enable: bool) -> list[float]:
    with Join([], process_group=None, enable=enable) as join:
        return [join.total_weight for _ in join.iterate(values_of(rank if enable else 0), **options)]


@pytest.mark.parametrize("window", [1, 2])
def test_total_weight_of_a_step(pool: Pool, window: int) -> None:
    weights = [sum(values) for values in STEPS]
    assert pool.run(totals, {"weigh": torch.Tensor.item, "window": window}, True) == [weights] * 3
    assert pool.run(totals, {"window": window, "lookahead": 3}, True) == [[float(len(values)) for values in STEPS]] * 3
    assert pool.run(totals, {}, False) == [[3.0] * 3] * 3


def test_mean_of_no_weight(pool: Pool) -> None:
    assert all(map(math.isnan, pool.run(mean_of_nothing)))


def mean_of_nothing(rank: int) -> float:
    with Join([], process_group=None) as join:
        [mean] = [join.mean(1.0, weight=0) for _ in join.iterate(range(1))]
    return mean


def enabled(rank: int) -> float:
    with Join([], process_group=None, enable=False) as join:
        [mean] = [join.mean(float(rank)) for _ in join.iterate(range(1))]
    return mean


def test_mean_in_a_block_that_is_not_enabled(pool: Pool) -> None:
    assert pool.run(enabled) == [1.0] * 3


def test_mean_outside_a_loop_says_what_to_do() -> None:
    join = Join([torch.nn.Linear(1, 1)])
    with join, pytest.raises(JoinError, match=r"outside the body of a loop.*joinables\.Mean.*\[J055\]"):
        join.mean(1.0)
    with join, pytest.raises(JoinError, match=r"outside the body of a loop.*\[J055\]"):
        print(join.total_weight)
    with join, pytest.raises(TypeError, match=r"value=.1\.0. is not .*\. Pass a number.*\[J001\]"):
        for _ in join.iterate(range(1)):
            join.mean({"loss": "1.0"})
    for weight in (-1, torch.tensor(-1)):
        with join, pytest.raises(ValueError, match=r"weight=-1 is not a finite number of at least 0.*\[J002\]"):
            for _ in join.iterate(range(1)):
                join.mean(1.0, weight=weight)
    with join, pytest.raises(TypeError, match=r"weight=tensor.*not a number.*\[J001\]"):
        for _ in join.iterate(range(1)):
            join.mean(1.0, weight=torch.ones(2))


def mean_of_epochs(rank: int, over_iterate: bool) -> list[float]:
    mean, found, counter = Mean(), list[float](), Counter(collective_of(None))
    for epoch in range(3):
        if epoch == 2:
            mean.reset()
        with Join([counter, mean]) as join:
            for batch in join.iterate(values_of(rank)) if over_iterate else values_of(rank):
                counter()
                mean.update(batch if over_iterate else batch.item(), 1 + epoch)
                mean.update(NAN, 0)
        found.append(mean.compute())
    mean.update(1000.0)
    return [*found, mean.compute()]


@pytest.mark.parametrize("over_iterate", [False, True])
def test_mean_of_an_epoch(pool: Pool, over_iterate: bool) -> None:
    """Two epochs count together, and the third alone; after that, a value of the rank itself is added."""
    ranks = pool.run(mean_of_epochs, over_iterate, ranks=len(COUNTS))
    every = [value for step in STEPS for value in step]
    for rank, (first, second, third, own) in enumerate(ranks):
        assert first == second == third == pytest.approx(sum(every) / len(every))
        mine = [value.item() for value in values_of(rank)] * 3
        assert own == pytest.approx((sum(mine) + 1000) / (len(mine) + 1))


def mean_of_unlike_epochs(rank: int) -> float:
    """Ranks have 1, 2, 3 in the first block, and only rank 2 has a value in the second."""
    mean, ddp = Mean(), DistributedDataParallel(torch.nn.Linear(1, 1))
    for values in ([1.0 + rank], [6.0] * (rank == 2)):
        with Join([ddp, mean]):
            for value in values:
                ddp(torch.ones(1, 1)).sum().backward()
                mean.update(value)
    return mean.compute()


def test_mean_of_a_rank_without_data_in_a_later_block(pool: Pool) -> None:
    """Its own values count again, and not the mean over all ranks."""
    assert pool.run(mean_of_unlike_epochs, ranks=3) == [3.0] * 3


def test_mean_of_a_rank_alone() -> None:
    mean = Mean()
    assert math.isnan(mean.compute())
    mean.update(torch.tensor([2.0], requires_grad=True), torch.tensor(3))
    mean.update(6)
    assert mean.compute() == 3.0
    with pytest.raises(TypeError, match=r"not a number\. Pass the mean.*\[J681\]"):
        mean.update(torch.ones(2))
    with pytest.raises(ValueError, match=r"weight=-1 .*\[J002\]"):
        mean.update(1.0, -1)


def lengths(rank: int) -> list[Any]:
    loader = range(COUNTS[rank])
    found: list[Any] = [steps(loader), steps(loader, 2), steps(loader, "all"), steps([], "all")]
    with pytest.raises(TypeError, match=r"\[J683\]"):
        steps(iter(loader) if rank == 1 else loader)
    with pytest.raises(TypeError if rank == 1 else ProtocolError, match="loader=None cannot be iterated"):
        steps(cast("Any", None) if rank == 1 else loader)
    with pytest.raises(ProtocolError, match=r"ranks \[0, 1\]: window=1; ranks \[2\]: window=2\. Pass.*\[J738\]"):
        steps(loader, 1 + rank // 2)
    with Join([], process_group=None) as join:
        with pytest.raises(JoinError, match=r"before the block\. \[J682\]"):
            steps(loader)
        assert len(list(join.iterate(loader))) == found[0]
    return found


def test_number_of_steps(pool: Pool) -> None:
    assert pool.run(lengths, ranks=len(COUNTS)) == [[3, 2, 1, 0]] * len(COUNTS)


def test_number_of_steps_of_one_process() -> None:
    assert steps(range(5), 2) == 3
    with pytest.raises(ValueError, match=r"\[J002\]"):
        steps(range(5), 0)
