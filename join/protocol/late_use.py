"""Consumers that take batches from ``join.iterate`` before the loop's body comes to them: :class:`LateUse`.

Whoever reads ahead of the body (``for x in prefetch(join.iterate(loader))``) has the body run on one batch while the
loop is at another, so a batch that counts is taken for a dummy. No module is called in the first step then, and the
bodies of the last steps run after the loop, on dummies where this rank had no data: nobody else calls a module on an
empty batch there. Or a module is called in another thread than the one that takes the batches.
"""

from __future__ import annotations

import threading
from typing import Any

from join.batch import has_empty_tensor
from join.errors import ProtocolError


class LateUse:
    """Looks where modules are called in one loop, and on what after it.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._thread = rank, threading.get_ident()
        self._steps = self._calls_after = 0  # of the loop; and calls of modules since it has ended
        self.has_ended = False
        """Whether the loop is over."""
        self.is_ruled_out = False
        """Whether nobody reads ahead, or nothing that was read is left to be used."""

    def begin_step(self) -> None:
        """Note that a batch is taken."""
        self._steps, self._thread = self._steps + 1, threading.get_ident()

    def called(self) -> None:
        """Check the thread in which a module is called, before that sends anything.

        Raises:
            ProtocolError: if the batches are taken in another thread.
        """
        if self.has_ended:
            self._calls_after += 1
            self.is_ruled_out = self._calls_after > self._steps
        elif threading.get_ident() != self._thread:
            self._refuse(f"in step {self._steps} of join.iterate in another thread than the one that takes the batches")
        else:
            self.is_ruled_out = self._steps == 1

    def used(self, arguments: Any) -> None:
        """Check the arguments that a module runs on.

        Raises:
            ProtocolError: if they are a dummy of a loop that has ended.
        """
        if self.has_ended and has_empty_tensor(arguments):
            self._refuse(f"on an empty batch after step {self._steps}, the last one of join.iterate")

    def _refuse(self, what: str) -> None:
        raise ProtocolError(
            f"on rank {self._rank}, a module was called {what}: batches are read ahead of the loop's body, which then"
            " takes dummies for data. Put what reads ahead inside: for batch in join.iterate(prefetch(loader)), or"
            " join.iterate(loader, lookahead=k) [J089]"
        )
