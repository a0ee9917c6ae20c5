"""What was accumulated since the last reduction: :class:`Window`, for DDP modules and replayed ones alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Window:
    """The backwards since the last reduction (under ``no_sync``, say); replaced by a new one when that is over.

    Attributes:
        own: whether this rank has gradients that no reduction has included yet.
        weighted: whether these are multiplied by ``join.weight``.
        weight: the sum of the weights of this rank's backwards.
        with_data: in a loop over ``Join.iterate``, the ranks that had data in one of the backwards, as a bit mask.
        with_dummies: in such a loop, whether a rank had no data in one of them.
    """

    own: bool = False
    weighted: bool = False
    weight: float = 0.0
    with_data: int = 0
    with_dummies: bool = False
