"""Every sample once, in the batches of one process."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
    default_collate,
)

from join.collectives import collective_of, run_threads
from joinables.trainer import Trainer, UnevenDistributedSampler, data, rng
from joinables.trainer.data import Plan, distribute, set_epoch, share
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, dataset, loader
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state

np: Any = pytest.importorskip("numpy")


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
        DataLoader(data, batch_sampler=BatchSampler(DistributedSampler(data, 2, 0), 2, False)),
        DataLoader(data, sampler=Unsized()),
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


class Drawn(Sampler[Any]):
    """Draws from every generator, and yields other numbers than its length says."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.generator, self.epoch = generator, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        own = torch.randint(20, (4,), generator=self.generator).tolist()
        yield from [*own, random.randrange(20), np.random.randint(20), self.epoch]

    def __len__(self) -> int:
        return 3


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0, 2.0] * 10, 17), "batch_size": 3},
    "with replacement": lambda: {"sampler": RandomSampler(range(20), replacement=True), "batch_size": 3},
    "fewer": lambda: {"sampler": RandomSampler(range(20), num_samples=3), "batch_size": None},
    "drawn": lambda: {"sampler": Drawn(), "batch_size": 2},
    "generator": lambda: {"sampler": Drawn(torch.Generator().manual_seed(5)), "batch_size": 1},
    "batches": lambda: {"batch_sampler": [[0, 1], [2], [3, 4, 5]]},
    "batches that are drawn": lambda: {"batch_sampler": OwnBatches(Drawn(), 2, False)},
}


class OwnBatches(BatchSampler):
    """Not torch's own class."""


@pytest.mark.parametrize("name", SAMPLERS)
def test_own_samplers_are_shared(name: str) -> None:
    """Each rank has its share of what one process has, at other states of the generators; epochs differ."""
    epochs: list[Any] = []
    for epoch in range(2):
        shares: list[list[Any]] = []
        for ranks, rank in ((1, 0), *((4, rank) for rank in range(4))):
            rng.seed_all(rank)
            part = distribute(DataLoader(range(20), **SAMPLERS[name]()), rank, ranks, 7)  # type: ignore[arg-type]
            set_epoch(part, epoch)
            state = random.getstate()
            shares.append([batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in part])
            assert len(part) == len(shares[-1])
            assert random.getstate() == state
        whole, *parts = shares
        assert [parts[step % 4][step // 4] for step in range(len(whole))] == whole
        assert sum(map(len, parts)) == len(whole)
        epochs.append(whole)
    assert epochs[0][:2] != epochs[1][:2] or name == "batches"


def shared(rank: int, name: str, size: int) -> Any:
    run, module = trainer(max_epochs=2, seed=1), Classifier()
    run.fit(module, DataLoader(dataset(20), **{**SAMPLERS[name](), "batch_size": size}))
    return flat_state(module.state_dict())


@pytest.mark.parametrize("name", ["weighted", "drawn"])
def test_a_fit_with_a_sampler_of_ones_own(pool: Pool, name: str) -> None:
    """Of three ranks, the last has no data."""
    expected = shared(0, name, {"weighted": 27, "drawn": 7}[name])
    for state in pool.run(shared, name, {"weighted": 9, "drawn": 4}[name], ranks=3):
        assert_same(state, expected, TOLERANCE)


class OfRank(Sampler[int]):
    """Distributes itself, and says so or not."""

    def __init__(self, rank: int, says: bool) -> None:
        self.rank = rank
        if says:
            self.num_replicas = 2

    def __iter__(self) -> Any:
        yield from range(self.rank, 10, 2)

    def __len__(self) -> int:
        return 5


def own_shares(rank: int, kind: Any, *args: Any) -> tuple[list[int], list[str]]:
    own = DataLoader(range(10), sampler=kind(*args), batch_size=None)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part = list(share(own, collective_of(None), 0))
    return part, [str(warning.message) for warning in caught]


def of_rank(rank: int, says: bool) -> Any:
    return own_shares(rank, OfRank, rank, says)


def test_samplers_that_distribute_themselves(pool: Pool) -> None:
    expected = [[*range(0, 10, 2)], [*range(1, 10, 2)]]
    assert pool.run(of_rank, True, ranks=2) == [(expected[0], []), (expected[1], [])]
    (first, [text]), second = pool.run(of_rank, False, ranks=2)
    assert (first, second) == (expected[0], (expected[1], []))
    assert "the OfRank of a loader yields there, since it yields different indices on each rank. " in text
    assert text.endswith("self.num_replicas = torch.distributed.get_world_size()")


def test_a_sampler_without_length_is_read_by_all(pool: Pool) -> None:
    (first, [text]), second = pool.run(own_shares, Unsized, ranks=2)
    assert (first, second) == ([*range(5)], ([*range(5)], []))
    assert "the Unsized of a loader yields there, since it has no length" in text


def order_of(seed: int | None = None, torch_seed: int = 0, generator: torch.Generator | None = None) -> list[float]:
    seen: list[float] = []
    torch.manual_seed(torch_seed)
    module = Classifier()
    module.on_train_batch_start = lambda batch, batch_idx: seen.extend(batch[0][:, 0].tolist())
    torch.manual_seed(torch_seed)
    Trainer(accelerator="cpu", seed=seed).fit(module, loader(shuffle=True, generator=generator))
    return seen


def test_the_order_follows_the_seeds() -> None:
    """That of the loader's generator, else the trainer's, else torch's."""

    def generator(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    assert order_of(torch_seed=5) == order_of(torch_seed=5) != order_of(torch_seed=6)
    assert order_of(seed=3, torch_seed=5) == order_of(seed=3, torch_seed=6) != order_of(seed=4)
    assert order_of(generator=generator(1)) == order_of(seed=1, torch_seed=2, generator=generator(1))
    assert order_of(generator=generator(1)) != order_of(generator=generator(2))
    again = generator(1)
    assert order_of(generator=again) != order_of(generator=again)


def outputs_of(rank: int, counts: tuple[int, ...]) -> Any:
    outputs: list[Any] = [(rank, index, torch.full((1000,), index)) for index in range(counts[rank])]
    gathered = data.gather_on_first(collective_of(None), outputs)
    assert all(tensor.tolist() == [index] * 1000 for part in gathered for _, index, tensor in part)
    return [[(source, index) for source, index, _ in part] for part in gathered], len(outputs)


def test_outputs_go_to_the_first_rank_only(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = 3, 0, 5
    first, *others = pool.run(in_pieces, counts)
    assert first == ([[(rank, index) for index in range(count)] for rank, count in enumerate(counts)], 3)
    assert others == [([[], [], []], 0)] * 2


def in_pieces(rank: int, counts: tuple[int, ...]) -> Any:
    with mock.patch.object(data, "_PIECE", 12_000):
        return outputs_of(rank, counts)


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
    assert (unknown.lengths, unknown.even) == ((None, 2), False)


class Encoded(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step((batch["x"], batch["y"]), batch_idx)


def encode(rows: list[Any]) -> UserDict[str, Any]:
    x, y = default_collate(rows)
    return UserDict({"x": x, "y": y})


def test_batches_of_a_tokenizer() -> None:
    data = dataset(7)
    trainers = [Trainer() for _ in range(2)]
    trainers[0].fit(Encoded(), DataLoader(data, 4, collate_fn=encode))
    trainers[1].fit(Classifier(), DataLoader(data, 4))
    assert trainers[0].callback_metrics == trainers[1].callback_metrics
