"""Detection of ranks that run a loop over ``Join.iterate`` differently: :class:`LoopProgress` and :class:`LateUse`.

:class:`LoopProgress` finds a rank that left the loop alone, or that skipped a burst or a collective which other ranks
run. Such a rank soon waits where no other rank arrives. That place is a roll call, if only the one at the end of the
loop, or the agreement of all ranks that leave the loop. While the rank waits, it asks the other ranks how far they are.
If one of them is in a burst, or in a collective of the loop body, that this rank has passed without running it, this
rank raises :class:`ProtocolError`. The other ranks are informed as of any failure (``join.failure.guard``).

A skipped collective may also be matched with one of a later step, and so on, so that no rank waits until the loop ends.
Each roll call therefore says how many operations a rank has started on the group since the last one. If the numbers
differ, all ranks meet (``Lockstep.meet``), and the rank that skipped a collective waits there alone, if collectives
block the CPU, as gloo's do. On a device the skip is found once a rank waits for the device. Gloo's numbers differ
without a fault, too, if some ranks have sent messages to each other. Then all ranks continue, and count anew.

:class:`LateUse` finds a consumer that takes batches before the loop body uses them, as in
``for x in prefetch(join.iterate(loader))``. The body then runs on one batch while the loop is at a later one, so a
batch with data is treated as a dummy. Two signs show such a consumer:

- No module is called in the first step, and the bodies of the last steps run after the loop. On a rank without data
  they run on dummies, and no other kind of loop calls a module on an empty batch after its end.
- A module is called in another thread than the one that takes the batches.
"""

from __future__ import annotations

import threading
import time
from typing import Any, NoReturn

import torch

from join.batch import Step, has_empty_tensor
from join.collectives import Collective
from join.collectives.board import Progress
from join.collectives.timeouts import TIMEOUTS
from join.errors import ProtocolError
from join.protocol.headers import Member


class LoopProgress:
    """Progress of this rank in one loop.

    Args:
        collective: The ranks.
        loop: The number of the loop, from 1.
    """

    def __init__(self, collective: Collective, loop: int) -> None:
        self.steps = 0
        """The number of steps that this rank has reached."""
        self.bursts = 0
        """The number of bursts that this rank has reached, without those that interject, which any step may have."""
        self.last_member: Member | None = None
        """The member that issued the last of these bursts."""
        self.has_left = False
        """Whether this rank has left the loop before its end."""
        self._collective, self._loop, self._rank = collective, loop, collective.rank
        self.issued = collective.issued_counter()
        """Function that returns the number of operations that this rank started on the group."""
        self.issued_before = self.issued()
        """That number when the loop began, or when all ranks last met."""
        self.ended_steps = self.bursts_in_ended_steps = 0
        """The number of steps that have ended on this rank, and of the bursts that it had reached by then."""
        self._others: dict[int, Progress] = {}  # the progress of the other ranks when this rank last asked for it
        self._still_since = 0.0  # when that progress last changed

    def place(self) -> Progress:
        """Return the progress of this rank, for the other ranks to read."""
        member = self.last_member  # once, since another thread calls this
        return Progress(
            loop=self._loop,
            step=self.steps,
            bursts=self.bursts,
            burst="" if member is None else member.joinable.join_name,
            issued=self.issued() - self.issued_before,
            left=self.has_left,
        )

    def all_have_left_here(self, others: dict[int, Progress]) -> bool:
        """Return whether all other ranks have left the loop in the same place as this rank."""
        return len(others) == self._collective.world_size - 1 and all(map(self._has_left_here, others.values()))

    def _has_left_here(self, other: Progress) -> bool:
        if other.loop > self._loop:
            return True  # the other rank has agreed with this one to leave, and is in a later loop
        return other.left and (other.loop, other.step, other.bursts) == (self._loop, self.steps, self.bursts)

    def look_for_skipped(self, others: dict[int, Progress]) -> None:
        """Check whether another rank is in a step or a collective that this rank has skipped.

        Args:
            others: The progress of the other ranks, by rank.

        Raises:
            ProtocolError: If so. The other ranks do not raise it.
        """
        in_loop = {rank: other for rank, other in others.items() if other.loop == self._loop}
        for rank, other in in_loop.items():
            has_more_bursts = other.bursts > self.bursts_in_ended_steps
            if self.has_left and (has_more_bursts or other.step > self.steps):
                raise ProtocolError(
                    f"Rank {self._rank} left the loop over join.iterate in step {self.steps}, but rank {rank} continued"
                    " it. Leave the loop on all ranks in the same place of the same step, on a condition that has the"
                    " same value on every rank. [J092]"
                )
            if has_more_bursts and other.step <= self.ended_steps:
                is_next = other.bursts == self.bursts_in_ended_steps + 1
                self._raise_skipped(other.burst if is_next else "a collective", other.step, rank)
        now, issued = time.monotonic(), self.place().issued
        places = {rank: other.moved() for rank, other in others.items()}
        if places != self._others:
            self._others, self._still_since = places, now
        is_still = now - self._still_since > TIMEOUTS.still
        for rank, other in in_loop.items():
            if is_still and other.step <= self.ended_steps and issued < other.issued:
                self._raise_skipped("a collective of the loop body", other.step, rank)

    def _raise_skipped(self, collective: str, step: int, rank: int) -> NoReturn:
        raise ProtocolError(
            f"Rank {self._rank} skipped {collective} in step {step} of join.iterate, or in an earlier step, but rank"
            f" {rank} ran it. Run the same loop body on every rank in every step, including steps on dummy batches."
            " Otherwise the ranks wait for each other forever. To ignore a batch, return 0 for it from the function"
            " passed as weigh=, instead of skipping code. [J093]"
        )


class LateUse:
    """Checks of the calls of modules, in one loop and after it, that find a consumer that reads ahead of the loop body.

    Args:
        rank: This rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._thread, self._steps = rank, threading.get_ident(), 0
        self._unused: int | None = None  # after the loop: how many of its batches may be used late
        self._has_samples = False  # whether this rank got dummies with samples, which look like data

    def begin_step(self) -> None:
        """Record that the loop yields a batch, and in which thread."""
        self._steps, self._thread = self._steps + 1, threading.get_ident()

    def end_loop(self, last: Step) -> None:
        """Record that the loop has ended, with its last step."""
        self._unused, self._has_samples = self._steps, last.is_dummy and not last.is_empty

    def called(self, arguments: Any) -> LateUse | None:
        """Check a call of a module, before the call sends anything.

        Args:
            arguments: The arguments of the call: tensors, or containers of them.

        Returns:
            This object; ``None`` if no consumer reads ahead, or every batch that it has read is used.

        Raises:
            ProtocolError: If the batches are taken in another thread, or the arguments are a dummy of a loop that has
                ended.
        """
        if self._unused is not None:
            if self._unused and (has_empty_tensor(arguments) or (self._has_samples and torch.is_grad_enabled())):
                self._refuse(f"after step {self._steps}, the last step of join.iterate, perhaps on a dummy of it")
            self._unused -= 1
            return self if self._unused > 0 else None
        if threading.get_ident() != self._thread:
            self._refuse(
                f"in step {self._steps} of join.iterate, in another thread than the one that takes the batches"
            )
        return None if self._steps == 1 else self

    def _refuse(self, call: str) -> NoReturn:
        raise ProtocolError(
            f"On rank {self._rank}, a module was called {call}. The batches are read ahead of the loop body, so"
            " dummies are confused with data. Move the prefetcher inside, as in for batch in"
            " join.iterate(prefetch(loader)), or use join.iterate(loader, lookahead=k). If nothing reads ahead, open a"
            " block of its own for the code after the loop. [J089]"
        )
