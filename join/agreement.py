"""Comparison of ranks: digests of the values that they should hold alike, and the text of a difference.

Each joinable lists in ``Joinable.equal_values`` the values that are equal on all ranks after the same steps: learning
rates, step counts, and so on. ``join.protocol.messages`` sends the digests; only if they differ are the values sent.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from join.errors import ProtocolError

Values = Sequence[tuple[str, Mapping[str, Any]]]
"""For each joinable, its name and its values by name."""

NORM = "squared norm of some rows"
"""Beginning of the name of a value that may differ more: the rounding of many steps depends on the processor."""

_DIGEST_BITS = 56
_LONGEST_LIST = 5  # differences in the text of an error


def digest_of(values: Values, parts: Sequence[str] = ()) -> int:
    """Return a number of 56 bits that is, in practice, different for different ``values`` or ``parts``."""
    return digest(repr([*parts, *((name, sorted(items.items())) for name, items in values)]))


def digest(text: str) -> int:
    """Return a number of 56 bits that is, in practice, different for different texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: _DIGEST_BITS // 8], "big")


def raise_difference(ranks: Mapping[int, Values]) -> None:
    """Raise an error that names the values of all ranks that differ; return if none does.

    A value that some rank lacks does not count as a difference, such as the state of a parameter that only its owner
    steps. Neither does rounding.

    Args:
        ranks: The values of each rank.

    Raises:
        ProtocolError: If values differ.
    """
    text = differences(ranks)
    if text:
        raise ProtocolError(
            f"Ranks hold different values, although the block keeps them equal: {text}. Step optimizers, schedulers and"
            " scalers, and change gradients and parameters, alike on all ranks, even if join.shadowing is true. Pass a"
            " scheduler a loss that is reduced over all ranks. Build schedules from joinables.steps(loader), because"
            " len(loader) differs between ranks, and continue counters that set learning rates with the largest of all"
            " ranks after each block. Load a checkpoint, or broadcast a value, on all ranks. [J441]"
        )


def differences(ranks: Mapping[int, Values]) -> str:
    """Return a text that lists the values that differ between ranks; "" if none does."""
    texts: list[tuple[bool, str]] = []
    first = next(iter(ranks))
    for position, (name, values) in enumerate(ranks[first]):
        for key in values:
            held = {rank: theirs[position][1].get(key, ...) for rank, theirs in ranks.items()}
            if ... not in held.values() and not all(is_same(key, held[first], value) for value in held.values()):
                words = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(held.items()))
                texts.append((key.startswith(NORM), f"the {key} of {name} is {words}"))
    listed = [text for _, text in sorted(texts, key=itemgetter(0))]  # other differences cause that of the norm
    more = [f"and {len(listed) - _LONGEST_LIST} more"] if len(listed) > _LONGEST_LIST else []
    return "; ".join(listed[:_LONGEST_LIST] + more)


def is_same(name: str, first: Any, second: Any) -> bool:
    """Return whether two values count as equal, up to rounding."""
    if isinstance(first, float) and isinstance(second, float):
        tolerance = 1e-3 if name.startswith(NORM) else 1e-6
        return math.isclose(first, second, rel_tol=tolerance) or (math.isnan(first) and math.isnan(second))
    return first == second
