"""Comparison of what all ranks hold alike when they have made the same steps: learning rates, step counts, and so on.

Every joinable says what that is by ``Joinable.equal_values``. A digest of all of it takes one small all-reduce, or
rides along with another exchange; only where the digests differ are the values themselves gathered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from join.collectives import Collective, Work
from join.errors import ProtocolError
from join.joinable import Joinable

Values = Sequence[tuple[str, Mapping[str, Any]]]
"""Of each joinable, its name and its values by name."""

_MOST = 5  # differences that an error tells of


def values_of(joinables: Sequence[Joinable]) -> Values:
    """Return what all ranks should hold alike."""
    return [(joinable.join_name, joinable.equal_values()) for joinable in joinables]


def digest_of(values: Values) -> int:
    """Return a number of 56 bits that differs, in practice, where ``values`` do."""
    return digest(repr([(name, sorted(each.items())) for name, each in values]))


def digest(text: str) -> int:
    """Return a number of 56 bits that differs, in practice, where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def check_equal(collective: Collective, values: Values, wait: Callable[[Work], None]) -> None:
    """Make sure that all ranks hold the same values: one all-reduce of two words.

    Args:
        collective: the group.
        values: those of this rank.
        wait: waits for the all-reduce.

    Raises:
        ProtocolError: on every rank, if they do not.
    """
    mine = digest_of(values)
    extremes = torch.tensor([mine, -mine])
    wait(collective.all_reduce(extremes, "min"))
    if int(extremes[0]) != -int(extremes[1]):
        raise_difference(collective, values)


def raise_difference(collective: Collective, values: Values) -> None:
    """Find out how ranks differ whose digests do: one all-gather of all values.

    Values that some rank lacks are no difference (the state of a parameter that only its owner steps), and rounding is
    none.

    Raises:
        ProtocolError: on every rank, if they differ.
    """
    told = differences(collective.all_gather_object(values))
    if told:
        raise ProtocolError(
            f"all ranks must hold the same when they have made the same steps, and they differ in this: {told}. Step"
            " optimizers, schedulers and scalers alike on all ranks, also where join.shadowing; give a scheduler a loss"
            " that is reduced over all ranks; set learning rates by a counter that is the same on all ranks, such as"
            " one to which join.report.steps is added [J441]"
        )


def differences(ranks: Sequence[Values]) -> str:
    """Return the values that differ between ranks, in words; empty if there are none."""
    found: list[str] = []
    for position, (name, mine) in enumerate(ranks[0]):
        for what in mine:
            held = [values[position][1].get(what, ...) for values in ranks]
            if ... in held or all(_is_same(held[0], each) for each in held):
                continue
            by_rank = ", ".join(f"{value!r} on rank {rank}" for rank, value in enumerate(held))
            found.append(f"the {what} of {name} is {by_rank}")
    more = f"; and {len(found) - _MOST} more" if len(found) > _MOST else ""
    return "; ".join(found[:_MOST]) + more


def _is_same(left: Any, right: Any) -> bool:
    if isinstance(left, float) and isinstance(right, float):
        return math.isclose(left, right, rel_tol=1e-6) or (math.isnan(left) and math.isnan(right))
    return left == right
