"""Every sample once, in the batches of one process."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from join.collectives import run_threads
from joinables.trainer import Trainer, UnevenDistributedSampler
from joinables.trainer.data import Plan, distribute
from tests.joinables.trainer.modules import Classifier, dataset, loader


@given(st.integers(0, 60), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_ranks_have_the_batches_of_one_process(total: int, ranks: int, block: int, shuffle: bool, epoch: int) -> None:
    def samples(count: int, rank: int) -> list[int]:
        sampler = UnevenDistributedSampler(range(total), count, rank, shuffle=shuffle, seed=5, block_size=block)
        sampler.set_epoch(epoch)
        found = list(sampler)
        assert len(sampler) == len(found)
        return found

    whole = samples(1, 0)
    assert sorted(whole) == list(range(total))
    blocks = [whole[start : start + block] for start in range(0, total, block)]
    for rank in range(ranks):
        assert samples(ranks, rank) == [index for each in blocks[rank::ranks] for index in each]


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 6))
def test_what_is_left_of_an_epoch_is_dealt_out_anew(
    total: int, before: int, after: int, block: int, steps: int
) -> None:
    def sampler(ranks: int, rank: int) -> UnevenDistributedSampler:
        return UnevenDistributedSampler(range(total), ranks, rank, shuffle=True, block_size=block)

    used = sampler(before, 0).used(steps)
    first = [sample for rank in range(before) for sample in list(sampler(before, rank))[: steps * block]]
    assert len(first) == used
    rest: list[int] = []
    for rank in range(after):
        mine = sampler(after, rank)
        mine.set_epoch(0, used)
        found = list(mine)
        assert len(mine) == len(found)
        rest += found
    assert sorted(first + rest) == list(range(total))


def test_shuffled_order_changes_with_the_epoch() -> None:
    sampler = UnevenDistributedSampler(range(50), 1, 0, shuffle=True)
    first = list(sampler)
    assert first == list(sampler)
    sampler.set_epoch(1)
    assert first != list(sampler)


def test_a_start_beyond_the_data() -> None:
    with pytest.raises(ValueError, match=r"start=4 is not a number of samples"):
        UnevenDistributedSampler(range(3), 1, 0).set_epoch(0, 4)


@pytest.mark.parametrize(("options", "text"), [({"rank": 2}, "rank=2"), ({"block_size": 0}, "block_size=0")])
def test_bad_samplers(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        UnevenDistributedSampler(range(3), **{"num_replicas": 2, "rank": 0, **options})


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        yield from range(5)


class Own(DataLoader[Any]):
    def __init__(self, samples: int, label: str) -> None:
        super().__init__(dataset(samples), batch_size=2)
        self.label = label


def test_what_is_dealt_out_and_what_is_not() -> None:
    data = dataset(20)
    for own in (
        DataLoader(data, sampler=UnevenDistributedSampler(data, 2, 0)),
        DataLoader(data, batch_sampler=[[0, 1], [2]]),
        DataLoader(data, sampler=RandomSampler(data, replacement=True)),
        DataLoader(data, sampler=RandomSampler(data, num_samples=3)),
        DataLoader(Endless()),
        [1, 2, 3],
    ):
        assert distribute(own, 0, 2, 0) is own
    assert distribute(loader(), 0, 1, 0) is not None
    dealt = distribute(loader(20, 3, drop_last=True, num_workers=1, prefetch_factor=3), 1, 2, 0)
    assert (dealt.drop_last, dealt.num_workers, dealt.prefetch_factor, dealt.batch_size) == (True, 1, 3, 3)
    assert len(dealt) == 3
    plain = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    assert [len(batch[0]) for batch in distribute(plain, 1, 2, 0)] == [4, 4]
    unbatched = distribute(DataLoader(data, batch_size=None), 1, 3, 0)
    assert len(list(unbatched)) == 7


def test_a_subclass_stays_what_it_is() -> None:
    given = Own(11, "mine")
    shares = [distribute(given, rank, 2, 0) for rank in range(2)]
    assert [type(share) for share in shares] == [Own, Own]
    assert [share.label for share in shares] == ["mine", "mine"]
    assert [len(x) for share in shares for x, _ in share] == [2, 2, 2, 2, 2, 1]
    assert len(list(given)) == 6, "the loader given is as it was"


class Twice(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield batch


class Unsized(Sampler[int]):
    def __iter__(self) -> Any:
        yield from range(5)


def test_numbers_of_batches_that_are_not_known() -> None:
    for unknown in (
        Twice(dataset(8), batch_size=2),
        DataLoader(dataset(5), batch_size=2, sampler=Unsized()),
        DataLoader(Endless()),
        iter([1]),
    ):
        plan = run_threads(2, lambda collective, each=unknown: Plan.agree(collective, each))[0]
        assert (plan.lengths, plan.even, plan.equal_batches) == ((None, None), False, False)


def test_plans() -> None:
    def plan(loaders: list[Any]) -> Plan:
        plans = run_threads(len(loaders), lambda collective: Plan.agree(collective, loaders[collective.rank]))
        assert all(each == plans[0] for each in plans)
        return plans[0]

    def shares(samples: int, **options: Any) -> list[Any]:
        return [distribute(loader(samples, 4, **options), rank, 2, 0) for rank in range(2)]

    even = plan(shares(16))
    assert (even.lengths, even.even, even.equal_batches) == ((2, 2), True, True)
    ragged = plan(shares(15))
    assert (ragged.lengths, ragged.even, ragged.equal_batches) == ((2, 2), True, False)
    assert plan(shares(15, drop_last=True)).lengths == (2, 1)
    unknown = plan([DataLoader(Endless()), loader(8, 4)])
    assert (unknown.lengths, unknown.even, unknown.shortest) == ((None, 2), False, None)


class Encoded(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def encode(rows: list[Any]) -> UserDict[str, Any]:
    x, y = default_collate(rows)
    return UserDict({"x": x, "y": y})


@pytest.mark.parametrize("precision", [32, 64])
def test_batches_of_a_tokenizer(precision: int) -> None:
    data = dataset(7)
    trainers = [Trainer(precision=precision) for _ in range(2)]
    trainers[0].fit(Encoded(), DataLoader(data, 4, collate_fn=encode))
    trainers[1].fit(Classifier(), DataLoader(data, 4))
    assert trainers[0].metrics == trainers[1].metrics
