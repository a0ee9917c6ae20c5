"""Comparison of ranks: the arguments with which they enter a block, and the values that they hold after the same steps.

Ranks that enter a block or a loop with different arguments would run collectives of different bursts; instead, all of
them raise. At the end of a block, each joinable lists in ``Joinable.equal_values`` the values that are equal on all
ranks: learning rates, step counts, and so on. The values of ``Joinable.before_entering`` are compared together with the
arguments. Every rank, active or joined, does the same::

    all-reduce (min) of [digest, -digest, ...]
    if the digests differ: all-gather of the values of each rank; all raise

At the end of a block, digests are part of other messages, or are summed on the line of headers (``join.block``). If the
digests differ, their sum is a multiple of one of them only by a chance as small as the chance of equal digests.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import itemgetter
from typing import Any, cast

import torch

from join.collectives import Collective
from join.collectives.base import Line
from join.errors import ProtocolError
from join.joinable import Joinable

Values = Sequence[tuple[str, Mapping[str, Any]]]
"""For each joinable, its name and its values by name."""

NORM = "squared norm of some rows of the parameters"
"""Name of a value that may differ more, since the rounding of many steps depends on the processor."""

DIGEST_BITS = 56
_LONGEST_LIST = 5  # differences in the text of an error


def check_same(
    collective: Collective,
    name: str,
    parts: Sequence[str],
    wait: Callable[..., Any],
    length: int | None = None,
    values: Values = (),
) -> tuple[int, int] | None:
    """Check that all ranks have the same arguments and values, of a block or loop: one all-reduce of five words.

    Args:
        collective: The ranks.
        name: The name of the block or loop, for the error text; without arguments, the activity of this rank.
        parts: The arguments of this rank, as texts.
        wait: Waits for the all-reduce; called with the work and a text that says what this rank is doing.
        length: The number of batches of this rank, if it is known.
        values: The values of this rank that are equal on all ranks now.

    Returns:
        The shortest and the longest length, if all ranks know theirs.

    Raises:
        ProtocolError: On every rank, if the arguments differ, or the values differ by more than rounding.
    """
    number, has_length = digest_of(values, parts), length is not None
    extremes = torch.tensor([number, -number, int(has_length), length or 0, -(length or 0)], device="cpu")
    wait(collective.all_reduce(extremes, "min"), f"entered {name} with {', '.join(parts)}" if parts else name)
    smallest, largest, all_have_length, shortest, longest = cast("list[int]", extremes.tolist())
    if smallest != -largest:
        _raise_not_same(collective, name, parts, values)
    return (shortest, -longest) if all_have_length else None


def start_check(
    collective: Collective, line: Line, name: str, parts: Sequence[str], values: Values, wait: Callable[..., Any]
) -> Callable[[], None]:
    """Start the comparison of :func:`check_same` as one sum on a line.

    The sum ends before the next sum of the line starts. ``wait`` is ``Guard.wait``.

    Returns:
        A function that waits for the sum. It raises as :func:`check_same` does.
    """
    number, size = digest_of(values, parts), collective.world_size
    work = line.sum(number, DIGEST_BITS + size.bit_length())

    def finish() -> None:
        if wait(work, f"entered {name} with {', '.join(parts)}", work.total) != number * size:
            _raise_not_same(collective, name, parts, values)

    return finish


def _raise_not_same(collective: Collective, name: str, parts: Sequence[str], values: Values) -> None:
    """Find the difference behind digests, and raise an error that names it. Values may differ by rounding."""
    by_rank: list[list[str]] = collective.all_gather_object(list(parts), plain=True)
    if all(theirs == by_rank[0] for theirs in by_rank):
        return raise_difference(collective, values)
    common = reduce(Counter[str].__and__, map(Counter, by_rank))
    own = [list((Counter(entered) - common).elements()) for entered in by_rank]
    ranks_of: dict[str, list[int]] = {}
    for rank, entered in enumerate(own if any(own) else by_rank):  # if no rank has its own, the order differs
        ranks_of.setdefault(", ".join(entered) or "nothing more", []).append(rank)
    texts = "; ".join(f"ranks {ranks}: {entered}" for entered, ranks in ranks_of.items())
    raise ProtocolError(
        f"The ranks entered {name} with different objects or arguments ({texts}). Pass the same objects, in the same"
        " order, and the same arguments on all ranks. [J020]"
    )


def values_of(joinables: Sequence[Joinable]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the values of joinables that should be equal on all ranks."""
    return [(joinable.join_name, joinable.equal_values()) for joinable in joinables]


def digest_of(values: Values, parts: Sequence[str] = ()) -> int:
    """Return a number of 56 bits that is, in practice, different for different ``values`` or ``parts``."""
    return digest(repr([*parts, *((name, sorted(items.items())) for name, items in values)]))


def digest(text: str) -> int:
    """Return a number of 56 bits that is, in practice, different for different texts."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: DIGEST_BITS // 8], "big")


def raise_difference(collective: Collective, values: Values) -> None:
    """Find the values behind digests that differ, and raise an error that names them: one all-gather of all values.

    A value that some rank lacks does not count as a difference, such as the state of a parameter that only its owner
    steps. Neither does rounding.

    Raises:
        ProtocolError: On every rank, if values differ.
    """
    text = differences(dict(enumerate(collective.all_gather_object(values, plain=True))))
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
            if ... not in held.values() and not all(_is_same(key, held[first], value) for value in held.values()):
                words = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(held.items()))
                texts.append((key == NORM, f"the {key} of {name} is {words}"))
    listed = [text for _, text in sorted(texts, key=itemgetter(0))]  # other differences cause that of the norm
    more = [f"and {len(listed) - _LONGEST_LIST} more"] if len(listed) > _LONGEST_LIST else []
    return "; ".join(listed[:_LONGEST_LIST] + more)


def _is_same(name: str, first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        tolerance = 1e-3 if name == NORM else 1e-6
        return math.isclose(first, second, rel_tol=tolerance) or (math.isnan(first) and math.isnan(second))
    return first == second
