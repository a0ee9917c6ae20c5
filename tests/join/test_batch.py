"""Tensors are found in whatever a data set hands out."""

from __future__ import annotations

from collections import OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_sequence

from join import Join
from join.batch import copied, emptied, has_empty_tensor, map_tensors, samples_in, tensors_in
from tests.harness import Pool, all_or_each


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


class Held(MutableMapping[str, Any]):
    """Keeps its items in an attribute, which a copy shares."""

    def __init__(self, **items: Any) -> None:
        self.held: Any = items

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        raise AssertionError("nothing may be written into a batch")

    def __delitem__(self, key: str) -> None:
        del self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class InSlots(Held):
    __slots__ = ("held",)


class Hidden(Held):
    """Keeps its items where nothing finds them."""

    def __init__(self, **items: Any) -> None:
        self.store = SimpleNamespace(held=items)

    held: Any = property(lambda self: self.store.held)


class Computed(Held):
    def __getitem__(self, key: str) -> Any:
        return self.held[key].clone()


class Attributes(dict[str, Any]):
    """A dict whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


class Looked(dict[str, Any]):
    """A dict whose attributes are its items."""

    __getattr__ = dict.__getitem__


class Rows(list[Any]):
    note = ""


class Ordered(OrderedDict[str, Any]):
    pass


class Two(tuple[Any, ...]):
    def __new__(cls, left: Any, right: Any) -> Two:
        return super().__new__(cls, (left, right))


@dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    parts: list[Any]


@dataclass
class Late:
    x: torch.Tensor
    lengths: torch.Tensor = field(init=False)
    never: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = self.x.sum(1)


def kept() -> torch.Tensor:
    return torch.ones(3, 2)


SHARED = {"x": torch.ones(3, 2)}
BATCHES: dict[str, Callable[[], Any]] = {
    "attribute": lambda: Held(x=kept(), more=Held(y=kept(), rows=Rows([kept()]))),
    "slots": lambda: InSlots(x=kept()),
    "attributes": lambda: Attributes(x=kept()),
    "looked": lambda: Looked(x=kept()),
    "rows": lambda: Rows([kept(), {"x": kept()}]),
    "user": lambda: UserDict(x=kept(), rows=UserList([kept()])),
    "ordered": lambda: Ordered(x=kept()),
    "default": lambda: defaultdict(lambda: 0, x=kept()),
    "frozen": lambda: Slotted(kept(), [kept()]),
    "late": lambda: Late(kept()),
    "packed": lambda: pack_sequence([kept()]),
    "twice": lambda: {"x": SHARED, "y": Held(x=SHARED, z=SHARED)},
}


def take_apart(batch: Any) -> None:
    """Change all tensors of a batch, and empty its containers."""
    for tensor in tensors_in(batch):
        tensor.zero_()
    for part in [*vars(batch).values()] if hasattr(batch, "__dict__") else []:
        if isinstance(part, (dict, list, Held, UserList)):
            take_apart(part)
    if hasattr(batch, "clear"):
        batch.clear()


@pytest.mark.parametrize("make", [emptied, partial(map_tensors, copied)])
@pytest.mark.parametrize("name", BATCHES)
def test_a_copy_shares_nothing_with_the_batch(name: str, make: Callable[[Any], Any]) -> None:
    batch = BATCHES[name]()
    before = [(tensor, tensor.clone()) for tensor in tensors_in(batch)]
    other = make(batch)
    assert type(other) is type(batch)
    assert len(tensors_in(other)) == len(before)
    assert samples_in(other) == (0 if make is emptied else 3)
    take_apart(other)
    for (tensor, value), now in zip(before, tensors_in(batch), strict=True):
        assert now is tensor
        assert torch.equal(now, value)


class Reads(torch.nn.Module):
    """Takes any of these batches as its argument, but no empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        x = tensors_in(batch)[0]
        if not len(x):
            raise ValueError("no samples")
        return self.layer(x)


def loop(rank: int, name: str, dummy: Any) -> list[bool]:
    """Train on batches that the data set keeps, and take each dummy apart."""
    batches = [BATCHES[name]() for _ in range((2, 0, 1)[rank])]
    before = [frozen(batch) for batch in batches]
    ddp = DistributedDataParallel(Reads())
    for _ in range(2):
        with Join([ddp], divide_by_initial_world_size=False) as join:
            for batch in join.iterate(batches, dummy=dummy):
                ddp(batch).sum().backward()
                if join.shadowing:
                    take_apart(batch)
    return [frozen(batch) == each for batch, each in zip(batches, before, strict=True)]


def frozen(batch: Any) -> Any:
    """What can be seen of a batch: its tensors, how often they were written to, and the parts of containers."""
    tensors = [(id(tensor), tensor._version, tensor.tolist()) for tensor in tensors_in(batch)]
    return tensors, len(batch) if hasattr(batch, "__len__") else 0, [*getattr(batch, "__dict__", {})]


@pytest.mark.parametrize(
    ("name", "dummy"),
    all_or_each(product([name for name in BATCHES if name not in ("default", "packed")], ["empty", "last"])),
)
def test_a_loop_leaves_batches_as_they_are(pool: Pool, name: str, dummy: str) -> None:
    """Not the two that cannot be sent to a rank without data, which is an error."""
    assert pool.run(loop, name, dummy, ranks=3) == [[True] * 2, [], [True]]


def test_attributes_remain_items() -> None:
    other: Any = emptied(Attributes(x=kept()))
    other.x = 1
    assert other["x"] == 1


@pytest.mark.parametrize(
    "batch", [Hidden(x=kept()), Computed(x=kept()), Two(kept(), 1)], ids=lambda batch: batch.__class__.__name__
)
def test_a_container_that_cannot_be_built_again(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"of type \w+ in a batch cannot be built again .*dummy=function.*J555"):
        emptied(batch)
    assert tensors_in(batch)[0].shape == (3, 2)
