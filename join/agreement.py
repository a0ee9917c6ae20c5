"""Comparison between ranks: what they enter alike, and what they hold alike when they have made the same steps.

Ranks that enter a block or a loop with different arguments would meet with collectives of different bursts; instead all
of them raise. At its end, every joinable says by ``Joinable.equal_values`` what is the same on all ranks: learning
rates, step counts, and so on. Every rank, active or not, does the same::

    all-reduce (min) of [digest, -digest, ...]
    if the digests differ: all-gather of what each rank has; all raise

At the ends of a block digests ride along with other messages, or are summed on the line of headers (``join.block``). If
not all digests are the same, a sum of them is no multiple of any, but by a chance as small as that of equal digests.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NoReturn, cast

import torch

from join.collectives import Collective, Work
from join.collectives.base import Line
from join.errors import ProtocolError
from join.joinable import Joinable

Values = Sequence[tuple[str, Mapping[str, Any]]]
"""Of each joinable, its name and its values by name."""

DIGEST_BITS = 56
_MOST = 5  # differences in an error's text


def check_same(
    collective: Collective,
    name: str,
    parts: Sequence[str],
    wait: Callable[[Work, str], None],
    length: int | None = None,
) -> tuple[int, int] | None:
    """Make sure that all ranks enter something alike: one all-reduce of five words.

    Args:
        collective: the group.
        name: what they enter.
        parts: what this rank enters it with.
        wait: waits for the all-reduce; gets a text that says what this rank is doing.
        length: how long it is on this rank, if it is known.

    Returns:
        The shortest and the longest length, if all ranks know it.

    Raises:
        ProtocolError: on every rank, if they do not agree.
    """
    number, has_length = digest("\n".join(parts)), length is not None
    extremes = torch.tensor([number, -number, int(has_length), length or 0, -(length or 0)], device="cpu")
    wait(collective.all_reduce(extremes, "min"), f"entered {name} with {', '.join(parts)}")
    smallest, largest, all_have_length, shortest, longest = cast("list[int]", extremes.tolist())
    if smallest == -largest:
        return (shortest, -longest) if all_have_length else None
    _raise_not_same(collective, name, parts)


def start_check(
    collective: Collective, line: Line, name: str, parts: Sequence[str], wait: Callable[[Work, str], None]
) -> Callable[[], None]:
    """Start to check what :func:`check_same` does: one sum on a line, which must be over before the line's next one.

    Returns:
        Waits for it; raises what :func:`check_same` does.
    """
    number, size = digest("\n".join(parts)), collective.world_size
    work = line.sum(number, DIGEST_BITS + size.bit_length())

    def finish() -> None:
        wait(work, f"entered {name} with {', '.join(parts)}")
        if work.total() != number * size:
            _raise_not_same(collective, name, parts)

    return finish


def _raise_not_same(collective: Collective, name: str, parts: Sequence[str]) -> NoReturn:
    by_rank: list[list[str]] = collective.all_gather_object(list(parts))
    common = reduce(Counter[str].__and__, map(Counter, by_rank))
    own = [list((Counter(entered) - common).elements()) for entered in by_rank]
    ranks_of: dict[str, list[int]] = {}
    for rank, entered in enumerate(own if any(own) else by_rank):  # else it is their order
        ranks_of.setdefault(", ".join(entered) or "nothing more", []).append(rank)
    texts = "; ".join(f"ranks {ranks}: {entered}" for entered, ranks in ranks_of.items())
    #: List the same objects in the same order on all ranks, and give the same arguments. The text says who gave what.
    raise ProtocolError(
        f"all ranks must enter {name} with the same, in the same order. They differ in this: {texts} [J020]"
    )


def values_of(joinables: Sequence[Joinable]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return what all ranks should hold alike."""
    return [(joinable.join_name, joinable.equal_values()) for joinable in joinables]


def digest_of(values: Values) -> int:
    """Return a number of 56 bits that differs, in practice, where ``values`` do."""
    return digest(repr([(name, sorted(items.items())) for name, items in values]))


def digest(text: str) -> int:
    """Return a number of 56 bits that differs, in practice, where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: DIGEST_BITS // 8], "big")


def check_equal(collective: Collective, values: Values, wait: Callable[[Work], None]) -> None:
    """Make sure that all ranks hold the same values: one all-reduce of two words.

    Args:
        collective: the group.
        values: those of this rank.
        wait: waits for the all-reduce.

    Raises:
        ProtocolError: on every rank, if they do not.
    """
    number = digest_of(values)
    extremes = torch.tensor([number, -number], device="cpu")
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
    text = differences(dict(enumerate(collective.all_gather_object(values))))
    if text:
        raise ProtocolError(
            f"all ranks must hold the same when they have made the same steps, and they differ in this: {text}. Step"
            " optimizers, schedulers and scalers alike on all ranks, also where join.shadowing; give a scheduler a loss"
            " that is reduced over all ranks; set learning rates by a counter that is the same on all ranks, such as"
            " one to which join.report.steps is added [J441]"
        )


def differences(ranks: Mapping[int, Values]) -> str:
    """Return the values that differ between ranks, in words; empty if there are none."""
    texts: list[str] = []
    first = next(iter(ranks))
    for position, (name, values) in enumerate(ranks[first]):
        for key in values:
            by_rank = {rank: theirs[position][1].get(key, ...) for rank, theirs in ranks.items()}
            if ... not in by_rank.values() and not all(_is_same(by_rank[first], value) for value in by_rank.values()):
                words = ", ".join(f"{value!r} on rank {rank}" for rank, value in sorted(by_rank.items()))
                texts.append(f"the {key} of {name} is {words}")
    more = f"; and {len(texts) - _MOST} more" if len(texts) > _MOST else ""
    return "; ".join(texts[:_MOST]) + more


def _is_same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-6) or (math.isnan(first) and math.isnan(second))
    return first == second
