"""``join.iterate(lookahead=0)``, which reads nothing ahead, and loaders that hand out the same memory again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import EarlyTerminationError, Join, JoinError, PeerError
from join.collectives import SingleCollective, ThreadCollective, run_threads
from tests.harness import Pool
from tests.join.counter import Counter
from tests.training import TOLERANCE, batch, build, mlp_in_one_process

COUNTS = 2, 4, 0


def filled(number: int) -> torch.Tensor:
    return torch.full((2, 3), float(number))


def in_a_tensor(count: int) -> Iterator[torch.Tensor]:
    memory = torch.empty(2, 3)
    for step in range(count):
        yield memory.copy_(filled(step))


def in_views(count: int) -> Iterator[torch.Tensor]:
    memory = torch.empty(2, 4)
    for step in range(count):
        memory[:, :3].copy_(filled(step))
        yield memory[:, :3]


def in_a_dict(count: int) -> Iterator[dict[str, torch.Tensor]]:
    items: dict[str, torch.Tensor] = {}
    for step in range(count):
        items["x"] = filled(step)
        yield items


def in_a_list_in_a_tuple(count: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
    items: list[torch.Tensor] = []
    for step in range(count):
        items[:] = [filled(step)]
        yield step, items


def in_an_array(count: int) -> Iterator[torch.Tensor]:
    array = torch.empty(2, 3).numpy()
    for step in range(count):
        array[:] = step
        yield torch.from_numpy(array)


REUSED = [in_a_tensor, in_views, in_a_dict, in_a_list_in_a_tuple, in_an_array]


def number_in(found: Any) -> float:
    while not isinstance(found, torch.Tensor):
        found = found["x"] if isinstance(found, dict) else found[-1]
    return found[0, 0].item()


def numbers(collective: ThreadCollective, loader: Any, **options: Any) -> list[float]:
    with Join([Counter(collective)]) as join:
        return [number_in(each) for each in join.iterate(loader, **options) if not join.shadowing]


@pytest.mark.parametrize("loader", REUSED)
def test_memory_that_is_used_again(loader: Callable[[int], Any]) -> None:
    def run(collective: ThreadCollective) -> list[float]:
        return numbers(collective, loader(COUNTS[collective.rank]), lookahead=0)

    assert run_threads(3, run) == [[0, 1], [0, 1, 2, 3], []]


@pytest.mark.parametrize("lookahead", [1, 3])
@pytest.mark.parametrize("loader", REUSED)
def test_memory_that_is_used_again_while_a_batch_is_held(loader: Callable[[int], Any], lookahead: int) -> None:
    def run(collective: ThreadCollective) -> str:
        with pytest.raises((JoinError, PeerError)) as caught:
            numbers(collective, loader(COUNTS[collective.rank]), lookahead=lookahead)
        return str(caught.value)

    for text in run_threads(3, run):
        assert "The generator has overwritten a batch" in text and "[J822]" in text


@pytest.mark.parametrize("loader", [[filled(1)] * 3, [{"x": filled(1)}] * 3, torch.ones(3, 2, 3)])
def test_a_batch_that_comes_again_is_no_fault(loader: Any) -> None:
    """Nor if the body changes it, since a plain loop sees that, too."""

    def run(collective: ThreadCollective) -> list[float]:
        with Join([Counter(collective)]) as join:
            return [number_in(each) for each in join.iterate(loader)]

    assert run_threads(2, run) == [[1, 1, 1]] * 2


@pytest.mark.parametrize("options", [{}, {"weigh": lambda _: 2}, {"dummy": "last"}, {"timeout": 60.0}])
def test_a_batch_is_read_when_its_step_begins(options: dict[str, Any]) -> None:
    """As it has to be if the next batch depends on the loop body."""

    def run(collective: ThreadCollective) -> list[Any]:
        policy, seen = [0], list[Any]()

        def played() -> Iterator[torch.Tensor]:
            for _ in range(COUNTS[collective.rank]):
                yield filled(policy[0])

        timeout, others = options.get("timeout"), {name: each for name, each in options.items() if name != "timeout"}
        with Join([Counter(collective)], timeout=timeout) as join:
            for each in join.iterate(played(), lookahead=0, **others):
                seen.append("dummy" if join.shadowing else number_in(each))
                policy[0] += 1
        return seen

    assert run_threads(3, run) == [[0, 1, "dummy", "dummy"], [0, 1, 2, 3], ["dummy"] * 4]


@pytest.mark.parametrize("leaves", [False, True])
def test_what_was_read_in_vain_is_pending(leaves: bool) -> None:
    """After the end at the first rank, and after a break."""

    def run(collective: ThreadCollective) -> list[list[float]]:
        with Join([Counter(collective)]) as join:
            seen = list[float]()
            loader = map(filled, range((2, 4, 3)[collective.rank]))
            for each in join.iterate(loader, "all" if leaves else "first", lookahead=0):
                seen.append(number_in(each))
                if leaves and len(seen) == 2:
                    break
        return [seen, [number_in(each) for each in join.pending]]

    assert run_threads(3, run) == [[[0, 1], []], [[0, 1], [2]], [[0, 1], [2]]]


def test_early_termination() -> None:
    def run(collective: ThreadCollective) -> int:
        steps = 0
        with pytest.raises(EarlyTerminationError), Join([Counter(collective)], throw_on_early_termination=True) as join:
            for _ in join.iterate(map(filled, range((2, 4, 3)[collective.rank])), lookahead=0):
                steps += 1
        return steps

    assert run_threads(3, run) == [2, 2, 2]


def test_what_has_to_know_more_is_an_error() -> None:
    with Join([Counter(SingleCollective())]) as join:
        for window in (2, "all"):
            with pytest.raises(ValueError, match=rf"window={window!r} is not possible with lookahead=0.*\[J002\]"):
                join.iterate([1], lookahead=0, window=window)  # pyright: ignore[reportArgumentType]
        with pytest.raises(
            ValueError, match=r"lookahead=-1 is not a finite number of at least 0\. Pass a number of steps"
        ):
            join.iterate([1], lookahead=-1)
        for _ in join.iterate([1], lookahead=0):
            with pytest.raises(JoinError, match=r"is_last_step was read outside .*lookahead=0.*J055"):
                _ = join.is_last_step


class Refuses(torch.nn.Sequential):
    """Takes no empty batch, so that each batch may become the one that dummies run on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            raise ValueError("no rows")
        return super().forward(x)


def train(rank: int, refuses: bool) -> list[torch.Tensor]:
    model = build("mlp")
    ddp = DistributedDataParallel(Refuses(model) if refuses else model)
    optimizer = torch.optim.Adam(ddp.parameters())
    memory = [torch.empty_like(each) for each in batch(rank, 0, 0)]

    def loader() -> Iterator[list[torch.Tensor]]:
        for step in range(COUNTS[rank]):
            for each, value in zip(memory, batch(rank, 0, step), strict=True):
                each.copy_(value)
            yield memory

    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate(loader(), lookahead=0):
            optimizer.zero_grad()
            (ddp(x) - y).square().mean().backward()
            optimizer.step()
    return [parameter.detach() for parameter in ddp.parameters()]


@pytest.mark.parametrize("refuses", [False, True])
def test_it_equals_one_process(pool: Pool, refuses: bool) -> None:
    for parameters in pool.run(train, refuses):
        torch.testing.assert_close(parameters, mlp_in_one_process(COUNTS), atol=TOLERANCE, rtol=0)
