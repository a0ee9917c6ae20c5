"""Trees of tensors from all ranks to all, and state from one rank to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from join import JoinError, transfer
from join.collectives import ThreadCollective, run_threads
from join.transfer import Exchange, broadcast_tensors, broadcast_tree, copy_state, gather_trees

DTYPES = [torch.bool, torch.int8, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]
DTYPES += [torch.uint16, torch.float8_e4m3fn]


def tree(rank: int) -> dict[str, Any]:
    return {
        "by dtype": [torch.arange(rank).to(dtype) for dtype in DTYPES],
        "scalar": torch.tensor(float(rank), dtype=torch.float64),
        "empty": torch.zeros(0, rank),
        "transposed": torch.arange(6.0).view(2, 3).t() * rank,
        "of this rank only": {rank: torch.ones(rank)},
        "plain": ("text", None, rank),
    }


def test_trees_of_any_shape_arrive_whole() -> None:
    for received in run_threads(4, lambda collective: gather_trees(collective, tree(collective.rank))):
        for rank, each in enumerate(received):
            expected = tree(rank)
            assert each["plain"] == expected["plain"]
            assert each["of this rank only"].keys() == {rank}
            for key in ("scalar", "empty", "transposed"):
                assert each[key].dtype == expected[key].dtype
                assert each[key].shape == expected[key].shape
                assert torch.equal(each[key], expected[key])
            assert all(map(torch.equal, each["by dtype"], expected["by dtype"]))
            assert [tensor.dtype for tensor in each["by dtype"]] == DTYPES


class Holds:
    """An object that is no container of tensors to torch. It computes with its tensor when it is unpickled."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> torch.Tensor:
        return self.tensor

    def __setstate__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if tensor.requires_grad else tensor.clone()


def held(rank: int) -> list[Holds]:
    full = torch.full((4,), 7.0 + rank)
    return [Holds(full), Holds(full.to_sparse()), Holds(torch.nn.Parameter(full))]


def test_objects_that_compute_while_they_are_unpickled() -> None:
    def rank_main(collective: ThreadCollective) -> tuple[Any, Any]:
        return gather_trees(collective, held(collective.rank)), broadcast_tree(collective, held(collective.rank), 1)

    for gathered, copied in run_threads(2, rank_main):
        for rank, objects in enumerate([*gathered, copied]):
            for ours, expected in zip(objects, held(min(rank, 1)), strict=True):
                assert type(ours.tensor) is type(expected.tensor)
                torch.testing.assert_close(ours.tensor, expected.tensor)


def test_trees_without_tensors() -> None:
    assert run_threads(2, lambda collective: gather_trees(collective, collective.rank)) == [[0, 1]] * 2


def test_what_cannot_travel_is_an_error_on_all_ranks() -> None:
    def rank_main(collective: ThreadCollective) -> str:
        with pytest.raises(RuntimeError) as caught:
            gather_trees(collective, [torch.ones(1), (lambda: None) if collective.rank else None])
        return str(caught.value)

    assert all("rank 1: " in text for text in run_threads(2, rank_main))


class Counting:
    """Counts the broadcasts of one rank."""

    def __init__(self, collective: ThreadCollective) -> None:
        self.sizes: list[int] = []
        self._broadcast = collective.broadcast
        collective.broadcast = self  # type: ignore[method-assign]

    def __call__(self, tensor: torch.Tensor, source: int) -> Any:
        self.sizes.append(tensor.numel() * tensor.element_size())
        return self._broadcast(tensor, source)


def mixed(rank: int) -> list[torch.Tensor]:
    """Tensors of all sizes of elements, in an order in which they would not be aligned."""
    sizes = enumerate((3, 1, 5, 0, 7, 2, 9), start=1)
    tensors = [(torch.arange(count) % 2 + number * rank).to(DTYPES[number - 1]) for number, count in sizes]
    return [*tensors, torch.full((2, 3), float(rank)).t(), torch.tensor(rank, dtype=torch.float16).expand(1)]


@pytest.mark.parametrize(("chunk", "messages"), [(64 * 2**20, 1), (40, 4), (1, 8)])
def test_tensors_of_a_device_are_one_message(chunk: int, messages: int) -> None:
    def rank_main(collective: ThreadCollective) -> tuple[list[torch.Tensor], list[int]]:
        counting, tensors = Counting(collective), mixed(collective.rank)
        broadcast_tensors(collective, tensors, 1)
        return tensors, counting.sizes

    with mock.patch.object(transfer, "CHUNK_BYTES", chunk):
        for tensors, sizes in run_threads(3, rank_main):
            assert len(sizes) == messages
            assert sum(sizes) == sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            assert all(map(torch.equal, tensors, mixed(1)))


def copied(reason: str) -> Callable[[ThreadCollective], list[Any]]:
    """Objects that are copied from rank 1: one that fits, one of another shape, one that rank 2 keeps."""

    def rank_main(collective: ThreadCollective) -> list[Any]:
        rank, received = collective.rank, list[Any]()

        def part(own: Any, *, keeps: bool = False, why_not: str = "") -> Exchange:
            inbox = yield own
            filled = own if keeps else inbox.fill(inbox.skeleton, own)
            yield why_not
            received.append(filled)

        fitting, kept = torch.full((3,), float(rank)), torch.full((2,), rank)
        parts = [
            ("first", part({"weight": fitting, "name": f"of {rank}"})),
            ("second", part([torch.full((rank + 1,), rank), fitting], why_not=reason if rank == 2 else "")),
            ("third", part(kept, keeps=rank == 2)),
        ]
        counting = Counting(collective)
        copy_state(collective, parts, 1)
        assert len(counting.sizes) == 2  # one for the trees
        assert received[0]["weight"] is fitting or rank == 1
        return received

    return rank_main


def test_all_state_travels_together() -> None:
    for rank, (first, second, third) in enumerate(run_threads(3, copied(""))):
        assert (first["weight"].tolist(), first["name"]) == ([1.0] * 3, "of 1")
        assert [each.tolist() for each in second] == [[1] * 2, [1.0] * 3]
        assert third.tolist() == [rank if rank == 2 else 1] * 2


def test_state_that_one_rank_cannot_copy() -> None:
    with pytest.raises(JoinError, match=r"The state of second cannot be copied .*: on rank 2, it is full\. Loop"):
        run_threads(3, copied("it is full"))


def test_a_tensor_that_is_at_two_places_receives_once() -> None:
    def rank_main(collective: ThreadCollective) -> list[float]:
        one = torch.zeros(1)
        tree = [one, one] if collective.rank else [torch.tensor([1.0]), torch.tensor([2.0])]
        return [float(each) for each in broadcast_tree(collective, tree, 0)]

    assert run_threads(2, rank_main) == [[1.0, 2.0]] * 2


def test_state_has_the_memory_layout_of_its_parameter() -> None:
    def rank_main(collective: ThreadCollective) -> bool:
        parameter = torch.ones(1, 2, 2, 2).to(memory_format=torch.channels_last)
        received: list[torch.Tensor] = []

        def part() -> Exchange:
            inbox = yield None if collective.rank else parameter.clone()
            received.extend(inbox.receive([inbox.skeleton], (), parameter) if collective.rank else [parameter])
            yield ""

        copy_state(collective, [("it", part())], 0)
        return received[0].is_contiguous(memory_format=torch.channels_last)

    assert run_threads(2, rank_main) == [True] * 2
