"""``Join.loader_state``: resumed with it at any step, every rank's loader hands out every sample once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from join import Join, JoinError
from join.collectives import ThreadCollective, collective_of, run_threads
from tests.ending import Ending
from tests.harness import Pool, in_test_all
from tests.join.counter import Counter

SIZES = 7, 3, 0


class Positioned:
    """A loader that knows where it is, and hands that out as it goes on to change it."""

    def __init__(self, size: int) -> None:
        self.size, self.state = size, {"at": 0, "epoch": 0}

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.state["at"] < self.size:
            self.state["at"] += 1
            yield torch.tensor([self.state["at"] - 1])
        self.state.update(at=0, epoch=self.state["epoch"] + 1)

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = dict(state)


def stateful_data_loader(size: int, workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(list(range(size)), batch_size=1, num_workers=workers)  # pyright: ignore[reportArgumentType]


def loader_of(kind: str, size: int) -> Any:
    return Positioned(size) if kind == "positioned" else stateful_data_loader(size, int(kind[-1]))


def resumed(rank: int, kind: str, lookahead: int, stops: range) -> None:
    collective = collective_of(None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata's own
        for stop in stops:
            seen: list[int] = []
            state: Any = None
            for leg in range(2):
                loader = loader_of(kind, SIZES[rank])
                if leg:
                    loader.load_state_dict(state)
                with Join([Counter(collective)]) as join:
                    for step, batch in enumerate(join.iterate(loader, lookahead=lookahead, resumable=True)):
                        if not join.shadowing:
                            seen += batch.tolist()
                        if (leg, step) == (0, stop):
                            break
                    state = join.loader_state()
            assert seen == list(range(SIZES[rank])), (stop, seen)


@pytest.mark.parametrize(
    ("kind", "lookahead", "stops"),
    [
        *[("positioned", lookahead, range(7)) for lookahead in (0, 1, 2, 4)],
        *[("workers: 0", lookahead, range(7)) for lookahead in (0, 1, 2, 4)],
    ],
)
def test_every_sample_exactly_once(pool: Pool, kind: str, lookahead: int, stops: range) -> None:
    pool.run(resumed, kind, lookahead, stops)


@in_test_all
@pytest.mark.parametrize("lookahead", [pytest.param(1, marks=in_test_all), 4])
def test_every_sample_of_a_loader_with_workers_exactly_once(ending: Ending, lookahead: int) -> None:
    ending.run(resumed, "workers: 2", lookahead, range(1, 6, 2))


def epochs(rank: int) -> None:
    """A loop that has come to its end leaves the loader's state at its end; one with ``enable=False`` alike."""
    collective = collective_of(None)
    for enable in (True, False):
        loader = Positioned(SIZES[rank])
        with Join([Counter(collective)], enable=enable) as join:
            with pytest.raises(JoinError, match=r"join.loader_state was called outside"):
                join.loader_state()
            for step, batch in enumerate(join.iterate(loader, lookahead=2, resumable=True)):
                if not join.shadowing:
                    assert join.loader_state() == {"at": int(batch) + 1, "epoch": 0}
                else:
                    assert join.loader_state() == {"at": SIZES[rank], "epoch": 0}
                    assert step >= SIZES[rank]
        assert join.loader_state() == {"at": 0, "epoch": 1}


def test_the_end_of_an_epoch(pool: Pool) -> None:
    pool.run(epochs)


@pytest.mark.parametrize("lookahead", [0, 1, 4])
def test_batches_that_a_loop_until_the_first_leaves(lookahead: int) -> None:
    """A rank may have read all of its loader, and has not come to its end."""

    def run(collective: ThreadCollective) -> Any:
        with Join([Counter(collective)]) as join:
            loader = Positioned((7, 3, 2)[collective.rank])
            for _ in join.iterate(loader, "first", lookahead=lookahead, resumable=True):
                pass
        return join.loader_state()

    assert run_threads(3, run) == [{"at": 2, "epoch": 0}] * 2 + [{"at": 0, "epoch": 1}]


class Unwilling(list[Any]):
    def state_dict(self) -> Any:
        raise ValueError("not now")


def test_loaders_that_have_no_state() -> None:
    def run(collective: ThreadCollective) -> None:
        with Join([Counter(collective)]) as join:
            with pytest.raises(TypeError, match=r"needs a loader with state_dict and load_state_dict, but list has"):
                join.iterate([1, 2], resumable=True)
            for _ in join.iterate(Unwilling([1, 2]), resumable=True):
                with pytest.raises(JoinError, match="state_dict of Unwilling raised an exception") as caught:
                    join.loader_state()
                assert isinstance(caught.value.__cause__, ValueError)

    run_threads(2, run)


class Counting(Positioned):
    """A loader whose state takes long to make."""

    calls = 0

    def state_dict(self) -> dict[str, int]:
        self.calls += 1
        return super().state_dict()


@pytest.mark.parametrize("enable", [True, False])
def test_a_loader_is_asked_for_its_state_only_if_the_loop_is_resumable(enable: bool) -> None:
    def run(collective: ThreadCollective) -> list[int]:
        asked: list[int] = []
        for resumable in (False, True):
            loader = Counting(SIZES[collective.rank])
            with Join([Counter(collective)], enable=enable) as join:
                list(join.iterate(loader, resumable=resumable) if resumable else join.iterate(loader))
            if not resumable:
                with pytest.raises(JoinError, match=r"outside a loop that keeps .*resumable=True.*J055"):
                    join.loader_state()
            asked.append(loader.calls)
        return asked

    assert run_threads(3, run) == [[0, size + 2] for size in SIZES]  # before the first batch, and at the end
