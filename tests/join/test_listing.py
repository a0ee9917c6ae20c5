"""Small things that a script does with its list, its loader and its block."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from join import Join, JoinError
from join.arguments import expand
from join.collectives import collective_of
from tests.harness import Pool
from tests.join.counter import Counter
from tests.training import batch, build


class Loader:
    """A loader with attributes, as timm's has them."""

    def __init__(self, count: int) -> None:
        self.count, self.mixup_enabled, self.step, self.state = count, True, 3, {"read": 0}

    def __iter__(self) -> Any:
        return iter([torch.full((2,), 1.0)] * self.count)

    def __len__(self) -> int:
        return self.count

    def state_dict(self) -> Any:
        return self.state


def attributes(rank: int) -> list[Any]:
    loader = Loader(2 * rank)
    with Join([], process_group=None) as join:
        batches: Any = join.iterate(loader)
        batches.mixup_enabled = False
        found = [len(batches), batches.step, loader.mixup_enabled, batches.mixup_enabled, len(list(batches))]
        for name in ("state_dict", "load_state_dict", "set_epoch"):
            with pytest.raises(AttributeError, match=rf"no {name},.*join\.loader_state\(\).*\[J684\]"):
                getattr(batches, name)
        with pytest.raises(AttributeError, match="'Loader' object has no attribute 'phase'"):
            getattr(batches, "phase")  # noqa: B009
    return found


class Epochs:
    """A loader whose batches and length depend on the epoch when its iterator is made, as those of samplers do."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 1 + self.epoch

    def __iter__(self) -> Any:
        return iter([self.epoch] * len(self))


def sets_the_epoch(rank: int, how: str) -> list[Any]:
    loader = Epochs()
    with Join([], process_group=None) as join:
        batches: Any = join.iterate(loader)
        batches.set_epoch(2) if how == "method" else setattr(batches, "epoch", 2)
        return [len(batches), *batches, loader.epoch]


@pytest.mark.parametrize("how", ["method", "attribute"])
def test_an_epoch_that_is_set_before_the_loop_counts(pool: Pool, how: str) -> None:
    """Scripts set it in the function of the loop, which receives the result of join.iterate."""
    assert pool.run(sets_the_epoch, how, ranks=2) == [[3, 2, 2, 2, 2]] * 2


class Shard(list[int]):
    """A loader with a sampler: its length does not depend on the epoch, and its samples do."""

    def set_epoch(self, epoch: int) -> None:
        self[:] = [epoch] * len(self)


def sets_the_epoch_after_len(rank: int, iterates: bool, **options: Any) -> Any:
    shard = Shard([0] * (3, 0)[rank])
    with Join([], process_group=None) as join:
        batches: Any = join.iterate(shard, **options)
        length = len(batches)
        batches.set_epoch(7)
        return length, [batch * (not join.shadowing) for batch in batches] if iterates else shard


@pytest.mark.parametrize("options", [{}, {"window": "all"}, {"lookahead": 2}], ids=str)
def test_len_reads_no_batch(pool: Pool, options: dict[str, Any]) -> None:
    of_rank_0, of_rank_1 = pool.run(partial(sets_the_epoch_after_len, **options), True, ranks=2)
    assert (of_rank_0, of_rank_1) == ((3, [7, 7, 7]), (3, [0, 0, 0]))
    assert pool.run(partial(sets_the_epoch_after_len, **options), False, ranks=2) == [(3, [7, 7, 7]), (3, [])]


def test_a_loop_has_the_attributes_of_its_loader(pool: Pool) -> None:
    assert pool.run(attributes, ranks=2) == [[2, 3, False, False, 2]] * 2


def with_none(rank: int) -> Any:
    model = DistributedDataParallel(build("mlp"))
    with Join([None, model, None], divide_by_initial_world_size=False) as join:
        for step in range(2 * rank):
            model(batch(rank, 0, step)[0]).sum().backward()
    return join.report.to_dict()["ranks"][1]["shadowed"], [Join.is_open_on(None)]


def test_none_is_skipped(pool: Pool) -> None:
    assert pool.run(with_none, ranks=2) == [(0, [False])] * 2
    with pytest.raises(ValueError, match=r"\[J011\]"):
        Join([None])


class ModelEMA:
    __slots__ = ("ema", "unset")

    def __init__(self) -> None:
        self.ema = torch.nn.Linear(1, 1)


class Averages(ModelEMA):
    def __init__(self) -> None:
        super().__init__()
        self.updates, self.kind = 0, torch.nn.Linear
        self.best = {"first": [torch.nn.Linear(1, 1)], "decay": 0.9}
        self.optimizer = torch.optim.SGD(self.ema.parameters(), lr=0.1)


def test_an_object_that_holds_a_module_says_what_to_list() -> None:
    with pytest.raises(TypeError, match=r"An object of type ModelEMA cannot.* List its \.ema instead, or.*\[J096\]"):
        Join([ModelEMA()])
    with pytest.raises(TypeError, match=r" List its \.ema and \.best\['first'\]\[0\] and \.optimizer instead, or"):
        Join([Averages()])
    with pytest.raises(TypeError, match=r"The class ModelEMA cannot join\. .* registered adapter\. Remove it"):
        Join([ModelEMA])


def current(rank: int) -> list[bool]:
    with pytest.raises(JoinError, match=r"called outside a block on this process group\. .*\[J055\]"):
        Join.current()
    found: list[bool] = []
    for enable in (True, False):
        with Join([Counter(collective_of(None))], enable) as outer:
            found.append(Join.current() is outer)
            with Join([Counter(collective_of(None))], enable) as join:
                found.append(Join.current(dist.group.WORLD) is join)
            found.append(Join.current() is outer)
    return found


def test_the_current_block(pool: Pool) -> None:
    assert pool.run(current, ranks=2) == [[True] * 6] * 2


def test_the_current_block_of_one_process() -> None:
    with Join([torch.nn.Linear(1, 1)]) as join:
        assert Join.current() is join


def test_objects_with_one_name_are_told_apart() -> None:
    first, second = (torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(2))
    names = [joinable.join_name for joinable in expand([first, None, second, torch.nn.Linear(1, 1)])]
    assert names == ["SGD (joinables[0])", "SGD (joinables[2])", "Linear"]
    assert [joinable.join_name for joinable in expand([second])] == ["SGD"]
