"""Arguments of ``Join.iterate``: :class:`Options`, and :func:`check_loader`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from join.arguments import checked_number
from join.errors import wrong_kind, wrong_value


@dataclass(frozen=True)
class Options:
    """Arguments of ``Join.iterate`` without the loader, and settings of its block as keywords.

    Keywords are not compared between ranks.

    Attributes:
        throw: Whether all ranks raise an exception as soon as one is out of data.
        over_all_ranks: Whether gradients are a mean over all ranks, including those without data. It has no effect if
            batches are weighed.
        resumable: Whether this rank keeps the states of its loader, an argument of ``Join.iterate``, too.
        copies: With ``enable=False``, the number of ranks that are assumed to have the batches of this rank, itself
            included; otherwise 1.

    The other attributes are the arguments of ``Join.iterate``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument has a value that is not allowed.
    """

    until: Literal["all", "first"]
    dummy: Literal["empty", "last"] | Callable[[Any], Any]
    lookahead: int
    weigh: Callable[[Any], Any] | None
    window: int | Literal["all"]
    fill_window: bool
    _: KW_ONLY
    resumable: bool = False
    throw: bool = False
    over_all_ranks: bool = True
    copies: int = 1

    def __post_init__(self) -> None:
        if self.until not in ("all", "first"):
            fix = "'all' to loop until all ranks are out of data, or 'first' to stop as soon as one is"
            raise wrong_value("until", self.until, "a valid value", fix)
        if self.dummy not in ("empty", "last") and not callable(self.dummy):
            fix = "'empty', 'last', or a function that returns a dummy batch for a batch"
            raise wrong_value("dummy", self.dummy, "a valid value", fix)
        window = 1 if self.window == "all" else self.window
        for name, number, least in (("lookahead", self.lookahead, 0), ("window", window, 1)):
            checked_number(name, number, "a number of steps", least=least, is_whole=True)
        if not self.lookahead and self.window != 1:
            raise ValueError(
                f"window={self.window!r} was passed with lookahead=0, but the weights of a window are added up before"
                " its first step, so its batches are read ahead. Pass lookahead=1 or window=1. [J820]"
            )
        if self.weigh is not None and not callable(self.weigh):
            fix = "a function that returns the weight of a batch, such as its number of samples"
            raise wrong_kind("weigh", self.weigh, "a function", fix)

    def to_compare(self) -> list[str]:
        """Return texts of the arguments, which must be equal on all ranks; functions are not distinguished."""
        arguments = [(field.name, getattr(self, field.name)) for field in fields(self) if not field.kw_only]
        return [f"{name}={'a function' if callable(value) else value}" for name, value in arguments]


def check_loader(loader: Any) -> None:
    """Raise a ``TypeError`` if a loader cannot be iterated, or would run code of the loop body too early."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(f"loader={loader!r} cannot be iterated. Pass a DataLoader, a list or a generator. [J068]")
    if getattr(loader, "__name__", "") == "log_every":  # by its name, since every project has its own MetricLogger
        raise TypeError(
            "log_every(...) would log each batch before the loop body runs. Write log_every(join.iterate(loader))."
            " [J524]"
        )
