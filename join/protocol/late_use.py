"""Consumers that take batches from ``join.iterate`` before the loop's body comes to them: :class:`LateUse`.

Whoever reads ahead of the body (``for x in prefetch(join.iterate(loader))``) has the body run on one batch while the
loop is at another, so a batch that counts is taken for a dummy, or the other way round. What gives that away::

    one of the first two steps ends, and no module was called in it; and then, in a later step or after the loop,
    modules are called on the batches of two earlier steps, which were not used in those steps; or
    no module was called in the first step, and in one in which this rank has an empty dummy, modules are called on
    samples, and not on it; or
    after a loop in which no module was called, one is called on an empty batch; or
    a module is called in another thread than the one that takes the batches: refused before it sends anything, as the
    collectives of the two threads would meet in any order

A loop whose first two steps call a module, as almost all do, is not looked at any further: whoever hands on the first
batch at once reads ahead in the second step. One that skips its first steps calls modules on the batches of the steps
it is in. One that keeps the batch before calls them on both.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from join.batch import StepBatch, tensors_in
from join.errors import ProtocolError

_REMEMBERED = 64  # batches: nobody reads as far ahead
_LOOKED_AT = 2  # steps, in all of which a module is called if nobody reads ahead


class LateUse:
    """Looks at what modules are called on in one loop.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._step = 0
        self._thread = threading.get_ident()
        self._kind = StepBatch.DATA
        self._unused: dict[int, list[weakref.ref[torch.Tensor]]] = {}  # by step: batches that no module was called on
        self._late: list[int] = []  # the steps whose batches were used in a later one
        self._on_samples = self._on_none = False  # what modules were called on in this step
        self._was_called = self._has_ended = False
        self._begun = 0  # how many bursts, up to this step
        self._used = 0  # how many of the first steps have called a module, one after another
        self._calls_after = 0  # of modules, since the loop has ended
        self.is_ruled_out = False
        """Whether nobody reads ahead: a module was called in each of the first steps, say."""

    def handed_out(self, batch: Any, kind: StepBatch, begun: int) -> None:
        """Note the batch of a step that begins; ``begun`` bursts have begun in the steps before.

        Raises:
            ProtocolError: if the one that ends has used others.
        """
        self._end_step(begun)
        self._step, self._kind, self._thread = self._step + 1, kind, threading.get_ident()
        self._unused[self._step] = [weakref.ref(tensor) for tensor in tensors_in(batch)]
        self._unused.pop(self._step - _REMEMBERED, None)

    def loop_ended(self, begun: int) -> None:
        """Note that the loop is over; ``begun`` as for :meth:`handed_out`.

        Raises:
            ProtocolError: as :meth:`handed_out`.
        """
        self._end_step(begun)
        self._has_ended = True
        self.is_ruled_out |= self._used == self._step  # of which there were few
        if not self._late:
            self._unused.clear()  # what has not been used in the loop at all may be used after it

    def called(self) -> None:
        """Check the thread in which a module is called, before that sends anything.

        Raises:
            ProtocolError: if the batches are taken in another thread.
        """
        if not self._has_ended and not self.is_ruled_out and threading.get_ident() != self._thread:
            self._refuse("was called in another thread than the one that takes the batches,")

    def used(self, arguments: Any) -> None:
        """Check the arguments that a module runs on.

        Raises:
            ProtocolError: if they are of another step than the one that the loop is at.
        """
        if not self._has_ended and self._uses_from_the_start():
            return
        tensors = [tensor for tensor in tensors_in(arguments) if tensor.dim()]
        if not tensors:
            return
        self._calls_after += self._has_ended
        self.is_ruled_out |= self._calls_after > self._step  # no batch of the loop is left to be used
        is_empty = not all(len(tensor) for tensor in tensors)
        self._on_none, self._on_samples = self._on_none or is_empty, self._on_samples or not is_empty
        if self._has_ended and not self._was_called and is_empty:
            self._refuse("was called on an empty batch")
        self._was_called |= not self._has_ended
        self._look_for_late({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()})

    def _uses_from_the_start(self) -> bool:
        """Note that a module is called in this step; return whether one was called in all steps so far."""
        if self._used == self._step - 1 < _LOOKED_AT:
            self._used, self._was_called = self._step, True
            self._unused.pop(self._step)
            self.is_ruled_out |= self._used == _LOOKED_AT
        return self._used == self._step

    def _look_for_late(self, memory: set[int]) -> None:
        """Find the steps whose batches lie in this memory, on which a module is called."""
        found: list[int] = []
        for step, batch in self._unused.items():
            held = [tensor for ref in batch if (tensor := ref()) is not None and tensor.numel()]
            if any(tensor.untyped_storage().data_ptr() in memory for tensor in held):
                found.append(step)
        for step in found:
            del self._unused[step]
        if self._has_ended or self._step not in found:  # else it is the same memory again and again
            self._late += found
        if len(self._late) > 1:
            self._refuse(f"was called on the batches of steps {self._late[0]} and {self._late[1]}")

    def _end_step(self, begun: int) -> None:
        """Check what was used in the step that ends, if one has begun."""
        if begun > self._begun:
            self._begun = begun
            self._uses_from_the_start()
        if self._kind is StepBatch.EMPTY and not self._used and self._on_samples and not self._on_none:
            self._refuse("was called on samples while this rank had none left")
        self._on_samples = self._on_none = False

    def _refuse(self, what: str) -> None:
        where = f"after step {self._step}" if self._has_ended else f"in step {self._step}"
        raise ProtocolError(
            f"on rank {self._rank}, a module {what} {where} of join.iterate: batches are read ahead of the loop's body,"
            " which then takes dummies for data. Put what reads ahead inside: for batch in"
            " join.iterate(prefetch(loader)), or join.iterate(loader, lookahead=k) [J089]"
        )
