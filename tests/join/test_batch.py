"""Tensors are found in whatever a data set hands out."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

from join.batch import has_empty_tensor, map_tensors, samples_in


@dataclass(frozen=True)
class Pair:
    x: torch.Tensor
    text: str = "text"
    parts: list[Any] = field(default_factory=list)


class Encoding(UserDict[str, Any]):
    """As tokenizers return it."""

    note = ""


class Plain(dict[str, Any]):
    pass


def test_samples_in_a_batch() -> None:
    assert samples_in({"text": "abc", "x": [torch.tensor(3.0), torch.zeros(7, 2)]}) == 7
    assert samples_in("text") == 1
    held = {"text": "abc", "x": torch.zeros(7, 2)}
    for batch in (Encoding(held), Plain(held), MappingProxyType(held), Pair(torch.tensor(1.0), parts=[held])):
        assert samples_in(batch) == 7


def test_tensors_are_mapped_wherever_they_are() -> None:
    given = Encoding({"x": torch.ones(2), "more": [Plain(y=torch.ones(1)), Pair(torch.ones(3), parts=[torch.ones(1)])]})
    given.note = "kept"
    mapped = map_tensors(lambda tensor: tensor.to("meta"), given)
    assert type(mapped) is Encoding
    assert mapped.note == "kept"
    first, second = mapped["more"]
    assert (type(first), type(second), second.text) == (Plain, Pair, "text")
    assert all(each.is_meta for each in (mapped["x"], first["y"], second.x, second.parts[0]))
    assert not given["x"].is_meta
    assert not given["more"][1].x.is_meta
    assert map_tensors(torch.neg, MappingProxyType({"x": torch.ones(1)})) == {"x": -1}
    anything = object()
    assert map_tensors(torch.neg, anything) is anything


def test_empty_tensors_are_found() -> None:
    number = torch.tensor(1.0)
    assert has_empty_tensor({"number": number, "rows": [torch.ones(0, 3)]})
    assert not has_empty_tensor({"number": number, "rows": [torch.ones(2, 0)]})
    assert not has_empty_tensor([number, "text"])
