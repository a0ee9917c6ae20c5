"""What goes wrong: exceptions on one rank, modules and samplers that do not fit."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from join import JoinError
from joinables.integrations.lightning import JoinStrategy
from tests.ending import Ending, assert_blamed, say
from tests.harness import assert_soon
from tests.integrations.lightning.training import Case, Counting, Module, Stream, loader_of, quiet, trainer_of


class Broken(Module):
    """Raises in a hook on one rank."""

    def __init__(self, hook: str, rank: int) -> None:
        super().__init__(Case())
        self.hook, self.rank = hook, rank

    def _raise(self, hook: str) -> None:
        if (hook, self.trainer.global_rank) == (self.hook, self.rank) and len(self.seen) == 2:
            raise ValueError("broken")

    def on_train_batch_end(self, *_: Any) -> None:
        self._raise("on_train_batch_end")

    def on_after_backward(self) -> None:
        self._raise("on_after_backward")

    def on_validation_batch_end(self, *_: Any) -> None:
        self._raise("on_validation_batch_end")


def break_down(rank: int, hook: str, failing: int) -> None:
    quiet(rank)
    loaders = [loader_of("stream", rank, 3 - 2 * rank) for _ in range(2)]
    trainer_of(Case(validate_every=2, epochs=1)).fit(Broken(hook, failing), *loaders)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_after_backward", "on_validation_batch_end"])
@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_ends_all_ranks(ending: Ending, hook: str, failing: int) -> None:
    ends = ending.ends(break_down, hook, failing, ranks=2)
    assert all(end.code for end in ends)
    assert_blamed([end.error for end in ends], failing, "ValueError: broken")
    assert_soon(abs(ends[0].at - ends[1].at), 10)


def wrap_twice(rank: int) -> None:
    quiet(rank)
    module: Any = Module(Case())
    module.net = DistributedDataParallel(module.net)
    with pytest.raises(ValueError, match=r"DistributedDataParallel twice .*net.* JoinStrategy wraps the whole .*J291"):
        trainer_of(Case()).fit(module, loader_of("stream", rank, 1))


def test_a_module_that_is_wrapped_already(ending: Ending) -> None:
    ending.run(wrap_twice, ranks=2)


def test_arguments() -> None:
    with pytest.raises(ValueError, match="weigh='tokens' is not a known weight"):
        JoinStrategy(weigh="tokens")  # pyright: ignore[reportArgumentType]


class Leaves(Module):
    """Stops on one rank."""

    def __init__(self, how: str) -> None:
        super().__init__(Case())
        self.how = how

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        if index == 1 and self.trainer.global_rank == 1:
            if self.how == "-1":
                return -1
            self.trainer.should_stop = True
        return None


def leave_alone(rank: int, how: str) -> str:
    quiet(rank)
    with pytest.raises(JoinError) as caught:
        trainer_of(Case(epochs=1)).fit(Leaves(how), loader_of("stream", rank, 4))
    return str(caught.value)


@pytest.mark.parametrize("how", ["-1", "should_stop"])
def test_a_rank_that_stops_alone(ending: Ending, how: str) -> None:
    for text in ending.run(leave_alone, how, ranks=2):
        assert "To stop, set trainer.should_stop or return -1 on all ranks in the same step" in text, text


def deal(rank: int, own: bool, size: int) -> list[int]:
    quiet(rank)
    dataset = TensorDataset(torch.arange(float(size)))
    sampler = DistributedSampler(dataset) if own else None
    module = Counting(Case())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(Case(epochs=1), strategy="join").fit(module, DataLoader(dataset, 2, sampler=sampler))
    say("warned", any("DistributedSampler repeats" in str(each.message) for each in caught))
    return module.seen


@pytest.mark.parametrize("size", [7, 1])
def test_an_injected_sampler_repeats_nothing(ending: Ending, size: int) -> None:
    ends = ending.ends(deal, False, size, ranks=2)
    assert sorted(ends[0].result + ends[1].result) == list(range(size)), ends
    assert [end.said("warned") for end in ends] == ["False", "False"]


def test_a_sampler_of_ones_own_that_repeats_is_warned_of(ending: Ending) -> None:
    ends = ending.ends(deal, True, 7, ranks=2)
    assert ends[0].said("warned") == "True"


class WantsIterator(Module):
    def training_step(self, dataloader_iter: Any) -> torch.Tensor:
        return self.net(next(dataloader_iter)[0][0]).mean()


def fetch_by_itself(rank: int) -> None:
    quiet(rank)
    with pytest.raises(TypeError, match="training_step takes dataloader_iter"):
        trainer_of(Case()).fit(WantsIterator(Case()), loader_of("stream", rank, 1))


def test_a_step_that_fetches_by_itself(ending: Ending) -> None:
    ending.run(fetch_by_itself, ranks=2)


class Uncopied(list[Any]):
    def __deepcopy__(self, _: Any) -> Any:
        raise RuntimeError("there is only one")


class Blocking(Module):
    """Leaves gradients unreduced in each step."""

    automatic_optimization = False

    def training_step(self, data: Any, index: int) -> None:
        with self.trainer.strategy.model.no_sync():
            self.manual_backward(self.net(data[0]).mean())


def fail(rank: int, blocks: bool) -> str:
    quiet(rank)
    module = (Blocking if blocks else Module)(Case())
    stream = Stream(rank, 3 - rank)
    loader: Any = stream if blocks else map(Uncopied, stream)
    with pytest.raises(JoinError) as caught:
        trainer_of(Case()).fit(module, loader)
    return str(caught.value)


@pytest.mark.parametrize(
    ("blocks", "told"), [(True, "Remove no_sync from"), (False, "Yield tensors in lists, tuples, dicts")]
)
def test_advice_is_in_the_words_of_lightning(ending: Ending, blocks: bool, told: str) -> None:
    """Also on the rank that is told of the error of another one."""
    for text in ending.run(fail, blocks, ranks=2):
        assert told in text and "join.iterate(" not in text
