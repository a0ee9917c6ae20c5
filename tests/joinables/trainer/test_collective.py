"""A strategy makes the collective of a run and takes it down, and may bring one of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from typing_extensions import override

from join import Burst, Join, PeerError, ProtocolError
from join.collectives import Collective, ReduceOp, TorchCollective, Work, collective_of
from join.joinable import OnGroup
from join.transfer import Exchange
from joinables.trainer import DDPStrategy, Strategy, Trainer
from joinables.trainer.launch import Place
from tests.examples import examples_of
from tests.harness import ALL, Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state

OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class Own(Collective):
    """The least that a library with collectives of its own needs, here over public functions of torch."""

    operations, is_open = 0, False

    @override
    def setup(self, rank: int, world_size: int) -> None:
        super().setup(rank, world_size)
        self.is_open = True

    @override
    def teardown(self) -> None:
        super().teardown()
        self.is_open = False

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self.operations += 1
        return dist.all_reduce(tensor, OPS[op], async_op=True)  # pyright: ignore[reportReturnType]

    @override
    def broadcast(self, tensor: torch.Tensor, source: int) -> Work:
        return dist.broadcast(tensor, source, async_op=True)  # pyright: ignore[reportReturnType]

    @override
    def all_gather(self, tensor: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Work:
        return dist.all_gather(list(outputs), tensor, async_op=True)  # pyright: ignore[reportReturnType]

    @override
    def barrier(self) -> None:
        dist.barrier()


class Gradients(OnGroup, Burst):
    """Means of the gradients over the batches of all ranks."""

    def __init__(self, collective: Collective, module: torch.nn.Module) -> None:
        super().__init__(collective)
        self.collective, self.parameters = collective, list(module.parameters())

    def average(self, weight: float) -> None:
        Join.notify_join_context(self)
        total = self.sum(weight)
        means = total[:-1].split([parameter.numel() for parameter in self.parameters])
        for parameter, mean in zip(self.parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter) / total[-1]

    @override
    def main_hook(self) -> None:
        self.sum(0.0)

    @override
    def exchange(self, source: int) -> Exchange:
        yield None
        yield ""
        for parameter in self.parameters:
            self.collective.finish(self.collective.broadcast(parameter.data, source))

    def sum(self, weight: float) -> torch.Tensor:
        own = [p.grad if weight and p.grad is not None else torch.zeros_like(p) for p in self.parameters]
        total = torch.cat([*(weight * gradient.flatten() for gradient in own), torch.tensor([weight])])
        self.collective.finish(self.collective.all_reduce(total))
        return total


class OverOwn(Strategy):
    """Trains in processes that run already, without a wrapper of torch's."""

    is_distributed = True
    collective: Own  # pyright: ignore[reportIncompatibleVariableOverride]

    @override
    @override
    def place(self, world_size: int) -> Place:
        return Place(dist.get_rank(), dist.get_world_size(), dist.get_rank())

    @override
    def make_collective(self) -> Collective:
        self.last = Own()
        return self.last

    @override
    def wrap(self, module: torch.nn.Module, device: torch.device, **options: Any) -> None:
        super().wrap(module, device, **options)
        self.gradients = Gradients(self.collective, module)

    @override
    @contextlib.contextmanager
    def block(self, listed: Sequence[Any], *, enable: bool, **_: Any) -> Generator[None]:
        with Join([self.gradients, *listed, self], enable) as join:
            yield
        self.report = join.report

    @override
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        loss.backward(**options)
        self.gradients.average(1.0 if weight is None else weight)


class Raises(Classifier):
    def on_train_end(self) -> None:
        raise KeyError("after training")


def over_own(rank: int, kind: type[Classifier], folder: Path) -> Any:
    strategy, module = OverOwn(), kind()
    options: Any = {"accelerator": "cpu", "max_epochs": 2, "default_root_dir": folder, "logger": False}
    with contextlib.suppress(KeyError):
        Trainer(strategy=strategy, devices=3, **options).fit(module, loader(27, 4))
    is_open = strategy.last.is_open or hasattr(strategy, "collective")
    return flat_state(module.state_dict()), strategy.last.operations, is_open


@pytest.mark.parametrize("kind", [Classifier, Raises])
def test_a_collective_of_ones_own(pool: Pool, tmp_path: Path, kind: type[Classifier]) -> None:
    """Uneven data on three ranks are trained exactly, and the collective is closed, even if the fit raises."""
    module = Classifier()
    trainer(max_epochs=2).fit(module, loader(27, 12))
    for state, operations, is_open in pool.run(over_own, kind, tmp_path, ranks=3):
        assert_same(state, flat_state(module.state_dict()), TOLERANCE)
        assert operations > 5 and not is_open


class Counting(TorchCollective):
    """Torch's ranks, and the number of their all-reduces."""

    operations = 0

    @override
    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> Work:
        self.operations += 1
        return super().all_reduce(tensor, op)


NAMES: dict[str, Any] = {"torch": torch, "DDPStrategy": DDPStrategy, "collective_of": collective_of}
NAMES |= {"CountingCollective": Counting, "__name__": __name__}
exec(examples_of("trainer.md")[-1].code, NAMES)
CountingStrategy: Any = NAMES["CountingStrategy"]


class OverCounting(CountingStrategy):
    """DDP whose block, metrics and votes are on a collective of one's own, as in the guide."""

    closed: Path  # a file

    def teardown(self) -> None:
        assert collective_of(None) is self.collective, "there is no other for this group"
        with self.closed.open("a") as file:
            file.write(f"{self.collective.rank} closed after {cast('Any', self.collective).operations}\n")
        super().teardown()


@pytest.mark.parametrize("kind", [Classifier, Raises])
def test_torchs_collective_with_more(tmp_path: Path, kind: type[Classifier]) -> None:
    strategy, module, alone = OverCounting(), kind(), Classifier()
    strategy.closed = tmp_path / "closed"
    with contextlib.suppress(KeyError) if kind is Raises else contextlib.nullcontext():
        Trainer(strategy=strategy, devices=2, accelerator="cpu", default_root_dir=tmp_path).fit(module, loader(12, 4))
        Trainer(devices=1).fit(alone, loader(12, 8))
        assert_same(flat_state(module.state_dict()), flat_state(alone.state_dict()), TOLERANCE)
    lines = strategy.closed.read_text().splitlines()
    assert sorted(line[:2] for line in lines) == ["0 ", "1 "]
    assert all(int(line.split()[-1]) > 0 for line in lines)


class Exchanges(Classifier):
    """Calls collectives of the strategy in a hook or a step; notes what came."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.found = where, list[Any]()

    def exchange(self) -> None:
        rank, strategy = self.trainer.global_rank, self.trainer.strategy
        own = torch.tensor([[1.0, rank]], requires_grad=True)
        gathered = strategy.all_gather(own)
        assert not gathered.requires_grad and gathered[rank].equal(own)
        reduced = [strategy.reduce(own, reduce_op=op).tolist() for op in ("mean", "sum", "min", "max")]
        self.found.append((tuple(gathered.shape), reduced, strategy.reduce(rank), own.tolist()))

    def __getattribute__(self, name: str) -> Any:
        if name == super().__getattribute__("__dict__").get("where"):
            super().__getattribute__("exchange")()
        return super().__getattribute__(name)


def exchanges(rank: int, where: str, data: Any, options: Any = None) -> Any:
    module = Exchanges(where)
    trainer(**(options or {})).fit(module, loader(data, 4) if isinstance(data, int) else data, loader(6, 4))
    return module.found


TOGETHER = ["setup", "configure_optimizers", "on_train_start", "on_train_epoch_start", "on_validation_epoch_end"]
TOGETHER += ["on_train_epoch_end", "on_train_end", "teardown"]


@pytest.mark.parametrize("where", TOGETHER)
def test_collectives_of_the_module_in_hooks_that_all_ranks_call(pool: Pool, where: str) -> None:
    """The third rank has no data."""
    for rank, found in enumerate(pool.run(exchanges, where, 6, ranks=3)):
        reduced = [[[1.0, 1.0]], [[3.0, 3.0]], [[1.0, 0.0]], [[1.0, 2.0]]]
        assert found == [((3, 1, 2), reduced, 1.0, [[1.0, float(rank)]])]
    assert exchanges(0, where, 6) == [((1, 1, 2), [[[1.0, 0.0]]] * 4, 0.0, [[1.0, 0.0]])]


APART = ["training_step", "prepare_data", "results_to_return"]
APART += ["on_before_optimizer_step", "on_train_batch_end", "validation_step", "on_save_checkpoint"] if ALL else []


@pytest.mark.parametrize("where", APART)
def test_collectives_of_the_module_where_other_ranks_do_not_call(tmp_path: Path, where: str) -> None:
    """The third rank has no data. All ranks say at once who called what."""
    with pytest.raises(RuntimeError, match=r"gathers float32\[1, 2\] on cpu.*\[J810\]"):
        run = Trainer(devices=3, accelerator="cpu", default_root_dir=tmp_path)
        run.fit(Exchanges(where), loader(6, 4), loader(6, 4))
    assert exchanges(0, where, 6) is not None


@pytest.mark.parametrize("samples", [12, 11], ids=["even", "weighted"])
def test_collectives_of_the_module_in_steps_that_all_ranks_make(pool: Pool, samples: int) -> None:
    for found in pool.run(exchanges, "training_step", samples, ranks=3):
        assert [shape for shape, *_ in found] == [(3, 1, 2)]


class Differs(Classifier):
    def on_train_start(self) -> None:
        strategy = self.trainer.strategy
        calls: list[Any] = [lambda: strategy.all_gather(torch.ones(2)), lambda: strategy.all_gather(torch.ones(3))]
        calls.append(lambda: strategy.reduce(torch.ones(2), reduce_op="max"))
        calls[self.trainer.global_rank]()


def differs(rank: int) -> str:
    with pytest.raises((ProtocolError, PeerError)) as caught:  # which a slow rank reads in the note of another one
        trainer().fit(Differs(), loader(4, 4))
    return str(caught.value)


def test_calls_that_differ_are_an_error_on_every_rank(pool: Pool) -> None:
    for text in pool.run(differs, ranks=3):
        assert "rank 1 gathers float32[3] on cpu; rank 2 reduces by 'max' float32[2]" in text


class Asks(Classifier):
    """Calls the same wrapper with other arguments on each rank."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_train_start(self) -> None:
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        if self.what == "broadcast":
            strategy.broadcast(rank, src=rank)
        else:
            strategy.reduce_boolean_decision(True, all=rank == 0)


def asks(rank: int, what: str) -> str:
    with pytest.raises((ProtocolError, PeerError)) as caught:
        trainer().fit(Asks(what), loader(4, 4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [("broadcast", "broadcasts an object of rank 1"), ("vote", "votes whether any decides so")],
)
def test_arguments_that_differ_are_an_error_on_every_rank(pool: Pool, what: str, text: str) -> None:
    for told in pool.run(asks, what, ranks=2):
        assert text in told


def test_a_reduction_that_is_unknown() -> None:
    module = Classifier()
    module.setup = lambda stage: module.trainer.strategy.reduce(1.0, reduce_op="avg")  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with pytest.raises(ValueError, match=r"reduce_op='avg' is unknown\. Use one of mean, .*\[J166\]"):
        Trainer().fit(module, loader(4, 4))


class Wraps(Classifier):
    """Calls Lightning's wrappers in a hook."""

    found: Any = None

    def on_train_start(self) -> None:
        strategy, rank = self.trainer.strategy, self.trainer.global_rank
        strategy.barrier()
        pair: Any = dist.new_group([0, 1])
        every = [strategy.broadcast({"rank": rank}, 1), strategy.all_gather(rank).tolist(), strategy.reduce(1.0 * rank)]
        every += [strategy.reduce_boolean_decision(rank != 1), strategy.reduce_boolean_decision(rank == 1, all=False)]
        sums = [strategy.reduce(rank, pair, "sum")] if rank < 2 else []
        self.found = every, sums


def wraps(rank: int) -> Any:
    module = Wraps()
    trainer().fit(module, loader(4, 4))
    return module.found


def test_wrappers_of_the_strategy(pool: Pool) -> None:
    """Numbers stay numbers, and the third rank is in no group."""
    every = [{"rank": 1}, [0, 1, 2], 1.0, False, True]
    assert pool.run(wraps, ranks=3) == [(every, [1]), (every, [1]), (every, [])]
    assert all(type(each) is int for each in pool.run(wraps, ranks=3)[0][1])
