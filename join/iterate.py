"""Any loop body in lockstep on uneven loaders: :class:`Iteration`, behind ``Join.iterate``.

All ranks run the body equally often. A rank that has run out of batches gets dummies, which weigh nothing. Who has how
many is told in one header for every ``lookahead`` steps, a *window*: a roll call, on a line of its own beside the
group, so that it never mixes with what the body sends::

    rank with data                                   rank without
    --------------                                   ------------
    begin     header of the channel                  the same
              read a window; roll call 0             roll call 0
              a rank has none: template (broadcast)  template
    window w  roll call w is read                    the same
              read the next; roll call w+1 starts    roll call w+1 starts
              its steps: batches                     its steps: dummies
    end       last roll call: all say how they ended the same

So nothing waits in the steady state: a roll call has a window's time to come through. A rank whose loader raises says
so in the next roll call; all ranks raise where that is read.

*Leaving early.* A rank that breaks out of the loop, or raises in its body, is missed by the others in the rest of its
step at the earliest. It answers the next roll call that it has not answered yet, and waits for the others there. If all
have left at the same step, that was an orderly end. If they do not come, they wait for this rank in collectives: it
shadows what it knows of the body, until they read its answer. What it does not know, the body's own collectives, it
cannot shadow; there the others are free only once this process ends. Several ranks may leave at different steps of a
window; each then shadows what is left of it for the others.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from datetime import timedelta
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from typing_extensions import Self, override

from join.collectives import Work
from join.dummies import emptied
from join.errors import EarlyTerminationError, JoinError, PeerError, ProtocolError
from join.lockstep import LockstepChannel
from join.roll_call import RollCall
from join.transfer import broadcast_tree

Until: TypeAlias = Literal["all", "first"]
Dummy: TypeAlias = Literal["empty", "last"] | Callable[[Any], Any]

_GRACE_SECONDS = 2.0
"""How long a rank that leaves waits for the others before it takes them to be waiting for it, at least."""
_LIMIT_SECONDS = 60.0
"""How long it waits for them altogether, at least."""


class Iteration(Iterator[Any]):
    """One loop in lockstep on this rank.

    Args:
        channel: the block's.
        loader: this rank's batches.
        until: ``"all"``: until all ranks have run out; ``"first"``: until the first one has.
        dummy: what ranks without batches get.
        lookahead: how many batches are read ahead, and steps told in one roll call.
        declared: whether ``len(loader)`` tells the number of batches on all ranks, so that no roll call is needed.
        throw: whether all ranks raise as soon as one has run out.

    Raises:
        TypeError, ValueError: for arguments that are none of these.
    """

    def __init__(
        self,
        channel: LockstepChannel,
        loader: Iterable[Any],
        until: Until,
        dummy: Dummy,
        lookahead: int,
        *,
        declared: bool,
        throw: bool,
    ) -> None:
        check_arguments(until, dummy, lookahead)
        self._channel, self._collective = channel, channel.collective
        self._until, self._dummy, self._throw, self._window = until, dummy, throw, lookahead
        self._length = _length_of(loader) if declared else None
        self._source = iter(loader)
        self._under_way: Work | None = None
        self._key = ""
        self._error: Exception | None = None  # the loader's
        self._is_exhausted = False
        self._template: Any = None  # what dummies are made of
        self._counts: list[int] = []  # how many batches each rank has in this window
        self._steps = self._at = 0  # of this window: its steps, and how many of them were begun
        self._read: deque[Any] = deque()  # for this window, and then for the next
        self._ahead = 0  # how many of these are for the next
        self._wrong = ""  # how this rank's batches differ from what it declared
        self._longest, self._since = 0.0, 0.0  # seconds: the longest step, the beginning of this one
        self._step = 0  # counted from the beginning of the loop
        self._state: Literal["new", "running", "over"] = "new"
        self.joined_at: float | None = None
        """When this rank ran out of batches, on the monotonic clock."""
        self.is_empty_dummy = False
        """Whether the batch that was handed out last is an empty one, made here."""

    @property
    def running(self) -> bool:
        """Whether the loop has begun and has not come to its end."""
        return self._state == "running"

    @property
    def pending(self) -> list[Any]:
        """The batches that were read ahead and not handed out, in their order."""
        return list(self._read)

    def handed_out(self) -> Iterator[Any]:
        """All batches and dummies, in a generator: one is told when the loop over it is left by a ``break``."""
        try:
            yield from self
        except GeneratorExit:
            self._channel.leave_loop = lambda: self.leave(None)  # not here, where nothing can be raised
            raise

    # -- handing out --------------------------------------------------------------------------------------------------

    @override
    def __iter__(self) -> Self:
        return self

    @override
    def __next__(self) -> Any:
        if self._state == "over":
            raise StopIteration
        if self._state == "new":
            self._begin()
        now = time.monotonic()
        if self._step:
            self._longest = max(self._longest, now - self._since)
        if self._at == self._steps:
            self._next_window()
            if not self._steps:
                self._end()
                raise StopIteration
        if self._throw and self._at >= min(self._counts):
            self._throw_early_termination()
        self._channel.meet(self._line, f"came to step {self._step + 1} of join.iterate")
        mine = self._at < self._counts[self._collective.rank]
        self._channel.step(self._mask(self._at))
        self._at += 1  # from here on, what goes wrong goes wrong in this step
        self._step += 1
        self._since = time.monotonic()
        return self._batch() if mine else self._make_dummy()

    def _batch(self) -> Any:
        self.is_empty_dummy = False
        if self._length is not None and not self._read:
            self._read_ahead(1)
            if self._error is not None:
                raise self._error
            if self._is_exhausted:
                self._wrong = f"has a loader of len {self._length} that ended after {self._step - 1} batches"
                return self._make_dummy()
        self._template = self._read.popleft()
        return self._template

    def _make_dummy(self) -> Any:
        if self.joined_at is None:
            self.joined_at = time.monotonic()
            if self._dummy == "empty":
                self._template = emptied(self._template)
        self.is_empty_dummy = self._dummy == "empty"
        return self._dummy(self._template) if callable(self._dummy) else self._template

    def _mask(self, step: int) -> int:
        return sum(1 << rank for rank, count in enumerate(self._counts) if count > step)

    # -- windows ------------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._channel.begin()
        self._state = "running"
        self._key = f"{self._channel.key}/loop/{self._channel.loop}"
        self._line = self._collective.companion()
        if self._length is not None:
            self._declare(self._length)
            return
        self._answers = _Answers(self._window)
        self._roll_call = RollCall(self._line, self._answers.largest)
        self._tell_next_window()

    def _declare(self, length: int) -> None:
        """Tell each other how many batches there are: all of them are one window."""
        counts = [int(each) for each in self._line.all_gather(torch.tensor([length]))]
        self._answers = _Answers(max(counts))
        self._roll_call = RollCall(self._line, self._answers.largest)
        self._begin_window(counts)

    def _next_window(self) -> None:
        """Read the roll call for the window that begins, and start the one for the next."""
        if self._length is not None:
            self._steps = 0  # there is none
            return
        self._begin_window(self._read_roll_call())
        if self._steps:
            self._tell_next_window()

    def _begin_window(self, counts: list[int]) -> None:
        first = not self._counts
        self._counts, self._at = counts, 0
        until_first = self._until == "first" and not self._throw
        self._steps = min(counts) if until_first else max(counts)
        if first and min(counts) == 0 < self._steps and not self._throw:
            self._share_template(counts)

    def _tell_next_window(self) -> None:
        self._read_ahead(self._window)
        self._call(self._answers.count(self._ahead) if self._error is None else self._failed(self._error))

    def _read_ahead(self, wanted: int) -> None:
        """Read up to ``wanted`` more batches."""
        self._ahead = 0
        while self._ahead < wanted and not self._is_exhausted:
            try:
                self._read.append(next(self._source))
                self._ahead += 1
            except StopIteration:
                self._is_exhausted = True
            except Exception as error:
                self._is_exhausted, self._error = True, error

    def _share_template(self, counts: list[int]) -> None:
        """Ranks that never had a batch get one from the lowest that has: empty if that is all that is wanted."""
        source = next(rank for rank, count in enumerate(counts) if count)
        template, problem = None, ""
        if self._collective.rank == source:
            try:
                if not self._read:
                    self._read_ahead(1)
                template = emptied(self._read[0]) if self._dummy == "empty" else self._read[0]
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        template, problem = broadcast_tree(self._line, (template, problem), source)
        if problem:
            raise JoinError(
                f"ranks without data need a dummy, and rank {source} cannot make an empty batch of its first one"
                f" ({problem}); give join.iterate(..., dummy=function) a function that makes a dummy of a batch"
            )
        if not counts[self._collective.rank]:
            self._template = template

    # -- roll calls ---------------------------------------------------------------------------------------------------

    def _call(self, answer: int) -> None:
        self._under_way = self._roll_call.call(answer)
        self._channel.tally.headers += 1
        self._channel.tally.nbytes += self._roll_call.nbytes

    def _read_roll_call(self) -> list[int]:
        """Wait for the roll call under way; how many batches each rank has.

        Raises:
            PeerError: if a rank has failed; the rank itself raises what its loader raised.
            ProtocolError: if a rank has left the loop, and this one has not.
        """
        assert self._under_way is not None
        started = time.monotonic()
        self._channel.wait(self._under_way, f"came to step {self._step + 1} of join.iterate")
        if self.joined_at is not None:
            self._channel.tally.idle += time.monotonic() - started
        self._under_way = None
        answers = self._roll_call.answers()
        failed = [rank for rank, answer in enumerate(answers) if self._answers.has_failed(answer)]
        if failed:
            self._over()
            if self._collective.rank in failed and self._error is not None:
                self._channel.closed = f"this rank raised {type(self._error).__name__}"
                raise self._error
            self._close_with(PeerError(self._texts(failed)))
        self._check_nobody_left(answers)
        return answers

    def _check_nobody_left(self, answers: list[int]) -> None:
        wrong = [rank for rank, answer in enumerate(answers) if answer == self._answers.wrong]
        if wrong:
            self._over()
            told = (f"rank {rank} {self._collective.get(f'{self._key}/wrong/{rank}')}" for rank in wrong)
            self._close_with(ProtocolError("; ".join(told)))
        left = [rank for rank, answer in enumerate(answers) if self._answers.has_left(answer)]
        if left:
            self._over()
            self._close_with(
                ProtocolError(
                    f"ranks {left} left the loop over join.iterate early, and the others did not. End it on all ranks"
                    " at the same step, by something that all ranks know"
                )
            )

    def _texts(self, ranks: list[int]) -> str:
        return "; ".join(self._collective.get(f"{self._key}/failure/{rank}") for rank in ranks)

    def _failed(self, error: BaseException) -> int:
        """Publish that this rank failed; the answer that says so."""
        rank = self._collective.rank
        self._collective.set(f"{self._key}/failure/{rank}", f"rank {rank} failed: {type(error).__name__}: {error}")
        return self._answers.failed(self._at)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """No rank has a batch, or under ``until="first"`` one has none: the last roll call."""
        if self._length is not None and not self._wrong and self._until == "all":
            self._read_ahead(1)
            if self._read:
                self._wrong = f"has a loader of len {self._length} that goes on after as many batches"
        if self._wrong:
            self._collective.set(f"{self._key}/wrong/{self._collective.rank}", self._wrong)
        self._call(self._answers.wrong if self._wrong else self._answers.count(0))
        self._read_roll_call()
        self._channel.end()
        self._over()

    def _throw_early_termination(self) -> None:
        rank = self._collective.rank
        exhausted = self._counts[rank] <= self._at
        self._over()
        mine = f"Rank {rank} exhausted all inputs."
        others = "Detected at least one rank that exhausted inputs. Throwing across all ranks."
        self._close_with(EarlyTerminationError(mine if exhausted else others))

    def _over(self) -> None:
        self._state = "over"
        self._channel.leave_loop = None

    def _close_with(self, error: JoinError) -> NoReturn:
        self._channel.closed = f"{type(error).__name__}: {error}"
        raise error

    # -- leaving early ------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None) -> None:
        """The block is left, or another loop begins, in the middle of this one.

        Args:
            error: what this rank raised, if it did.

        Raises:
            ProtocolError: without an ``error``, if not all ranks have left at this step.
            PeerError: if another rank has failed, and this one not or with a ``RuntimeError`` that may come of it.
        """
        self._channel.leave_loop = None  # what is owed is announced below
        try:
            with self._explained():
                self._leave(error)
        except (PeerError, ProtocolError) as told:
            # What a collective raises when a peer is gone is explained by this; anything else is the user's to see.
            if error is None or (isinstance(error, RuntimeError) and not isinstance(error, JoinError)):
                raise told from error
        except Exception:
            if error is None:
                raise
            # The user's exception is under way and must not be replaced by ours.
        finally:
            self._over()
            if error is not None:
                self._channel.closed = self._channel.closed or f"this rank raised {type(error).__name__}"

    def _leave(self, error: BaseException | None) -> None:
        self._channel.fulfil()
        answer = self._failed(error) if error is not None else self._answers.left(self._at)
        patience = max(_GRACE_SECONDS, 3 * self._longest)
        if self._under_way is not None:  # sent when this window began: all have come to it, or will
            self._await(_LIMIT_SECONDS + patience)
            if any(self._answers.is_end(reply) for reply in self._roll_call.answers()):
                self._accompany_window()  # the others read it when this window is over
            answers = self._read_roll_call()
        else:
            answers = [0] * self._collective.world_size
        limit = patience if error is not None else _LIMIT_SECONDS
        self._call(answer)
        accompanies = not self._await(patience)
        if accompanies:
            self._collective.set(f"{self._key}/accompanied", "")
            self._accompany_window()
            if not self._await(limit):
                self._give_up(error)
        replies = self._roll_call.answers()
        if all(reply == answer for reply in replies):
            self._part(limit, accompanies=accompanies)
            if error is None:
                self._channel.end()
            return
        if all(self._answers.is_end(reply) for reply in replies):
            self._accompany_window()  # those who left earlier wait in it for those who left later
        self._counts, self._at = answers, 0
        self._steps = min(answers) if self._until == "first" else max(answers)
        if not all(self._answers.is_end(reply) for reply in replies):
            self._accompany_window(begun=False)
        if error is None:
            failed = [rank for rank, reply in enumerate(replies) if self._answers.has_failed(reply)]
            if failed:
                self._close_with(PeerError(self._texts(failed)))
            self._check_nobody_left(replies)

    def _part(self, limit: float, *, accompanies: bool) -> None:
        """All have left at one step. Who came early may have lost patience, and shadows a window that nobody makes."""
        deadline = time.monotonic() + limit
        self._call(self._answers.count(0))
        while not self._await(0.1) and time.monotonic() < deadline:
            if not accompanies and self._collective.check(f"{self._key}/accompanied"):
                accompanies = True
                self._accompany_window()

    def _accompany_window(self, *, begun: bool = True) -> None:
        """Shadow the steps of this window that the others still make; if it has begun, from where this rank left."""
        if begun:
            self._channel.accompany(rest=True)
        while self._at < self._steps:
            self._channel.meet(self._line, f"has left join.iterate before step {self._step + 1}")
            self._channel.step(self._mask(self._at))
            self._channel.accompany()
            self._at += 1

    @contextlib.contextmanager
    def _explained(self) -> Generator[None]:
        """A collective that fails because a peer's process is gone says what that peer has raised, if it has."""
        try:
            yield
        except JoinError:
            raise
        except Exception:
            self._check_peers()
            raise

    def _check_peers(self) -> None:
        """Raise if a peer has failed."""
        failed: list[int] = []
        with contextlib.suppress(Exception):  # the store may be gone with the peer
            ranks = [rank for rank in range(self._collective.world_size) if rank != self._collective.rank]
            failed = [rank for rank in ranks if self._collective.check(f"{self._key}/failure/{rank}")]
        if failed:
            self._close_with(PeerError(self._texts(failed)))

    def _await(self, seconds: float) -> bool:
        """Wait for the roll call under way; whether it came through in time."""
        assert self._under_way is not None
        deadline = time.monotonic() + seconds
        while not self._under_way.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                self._under_way.wait(timedelta(seconds=min(left, 0.5)))
            except RuntimeError:
                if self._under_way.is_completed():
                    raise  # not a timeout: the collective itself failed
        self._under_way.wait()
        return True

    def _give_up(self, error: BaseException | None) -> None:
        if error is None:
            self._close_with(
                ProtocolError(
                    f"rank {self._collective.rank} left the loop over join.iterate early, and not all others did: they"
                    " wait for it in collectives that no joinable stands for. The process group cannot be used any more"
                )
            )


def check_arguments(until: Any, dummy: Any, lookahead: Any) -> None:
    """Refuse arguments of ``iterate`` that it cannot use.

    Raises:
        TypeError, ValueError: that name the argument, the value and the way out.
    """
    if until not in ("all", "first"):
        raise ValueError(f"until={until!r} must be 'all' or 'first': run until all ranks, or the first, have run out")
    if dummy not in ("empty", "last") and not callable(dummy):
        raise ValueError(f"dummy={dummy!r} must be 'empty', 'last', or a function that makes a dummy of a batch")
    if isinstance(lookahead, bool) or not isinstance(lookahead, int):
        raise TypeError(f"lookahead={lookahead!r} must be a whole number of batches")
    if lookahead < 1:
        raise ValueError(f"lookahead={lookahead} must be at least 1 batch")


def _length_of(loader: Iterable[Any]) -> int:
    if not isinstance(loader, Sized):
        raise TypeError(
            f"steps='loader' needs a loader with a length, and {type(loader).__name__} has none; leave steps out"
        )
    return len(loader)


class _Answers:
    """What a rank may answer to a roll call, as one number.

    Args:
        window: the most batches it may have for a window.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self._failed, self._left = window + 1, 2 * window + 2
        self.wrong = self.largest = 3 * window + 3

    def count(self, batches: int) -> int:
        """It has as many batches."""
        return batches

    def failed(self, step: int) -> int:
        """It raised after this many steps of the window."""
        return self._failed + min(step, self._window)

    def has_failed(self, answer: int) -> bool:
        """Whether an answer says so."""
        return self._failed <= answer < self._left

    def left(self, step: int) -> int:
        """It left the loop after this many steps of the window."""
        return self._left + min(step, self._window)

    def has_left(self, answer: int) -> bool:
        """Whether an answer says so."""
        return self._left <= answer < self.wrong

    def is_end(self, answer: int) -> bool:
        """Whether an answer says that its rank does not go on."""
        return answer >= self._failed
