"""Trees of tensors from all ranks to all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from join.collectives import ThreadCollective, run_threads
from join.transfer import gather_trees

DTYPES = [torch.bool, torch.int8, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8]


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


def test_trees_without_tensors() -> None:
    assert run_threads(2, lambda collective: gather_trees(collective, collective.rank)) == [[0, 1]] * 2


def test_what_cannot_travel_is_an_error_on_all_ranks() -> None:
    def rank_main(collective: ThreadCollective) -> str:
        with pytest.raises(RuntimeError) as caught:
            gather_trees(collective, [torch.ones(1), (lambda: None) if collective.rank else None])
        return str(caught.value)

    assert all("rank 1: " in text for text in run_threads(2, rank_main))
