"""Where in an epoch a rank is: :class:`Position`, which reads the batches and knows how a fit resumes between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from joinables.trainer.loops import rng
from joinables.trainer.loops.data import UnevenDistributedSampler, set_epoch
from joinables.trainer.loops.metrics import MetricStore


class Position:
    """Where in an epoch a rank is, and its part of a snapshot: what a fit that resumes from here needs of this rank.

    Args:
        metrics: the store of the epoch's metrics, also while those of its validation are recorded elsewhere.

    Attributes:
        epoch: the epoch under way, from 0.
        batches_read: how many of its batches this rank has trained on; 0 between epochs.
        sampler: what deals out the samples to train on, if the trainer does.
        resume_from: this rank's part of the snapshot that the fit resumes from, until the first batches are read.
    """

    def __init__(self, metrics: MetricStore) -> None:
        self._metrics = metrics
        self.epoch = self.batches_read = 0
        self.sampler: UnevenDistributedSampler | None = None
        self.resume_from: dict[str, Any] | None = None
        self._random_at_start: dict[str, Any] | None = None
        """The random state before the epoch's first batch was read; ``None`` between epochs."""
        self._random_before_read: dict[str, Any] | None = None
        """The random state before the batch that comes next was read."""
        self._random_to_resume: dict[str, Any] | None = None
        """The random state for a snapshot taken now; ``None`` if it is the present one.

        It is an older one where a fit that resumes from there does something again: see ``redo_from_here``, and in a
        step, before which the next batch was read.
        """

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of a snapshot taken now."""
        before_read = self._random_before_read
        return self.resume_from or {
            "batches": self.batches_read,
            "start": None if self.sampler is None else self.sampler.start,
            "used": None if self.sampler is None else self.sampler.used(self.batches_read),
            "metrics": self._metrics.state_dict(),
            "random_at_start": self._random_at_start,
            "random_before_read": None if before_read is None else rng.capture(before_read),
            "random": rng.capture(self._random_to_resume),
        }

    def load_state_dict(self, part: dict[str, Any]) -> None:
        """Have the fit resume from this rank's part of a snapshot."""
        self.resume_from = part
        if part["random_at_start"] is None:  # else the generators are set as the batches are read again
            rng.restore(part["random"])

    def begin_epoch(self, epoch: int, loader: Any) -> None:
        """Have ``loader`` deal out an epoch, or what is left of the one in which the fit resumes."""
        self.epoch = epoch
        self.redo_from_here()
        set_epoch(loader, epoch)
        if self.sampler is not None and self.resume_from is not None:
            self.sampler.set_epoch(epoch, self.resume_from["start"] or 0)

    def redo_from_here(self) -> None:
        """Have a fit that resumes do again what follows: the hooks before an epoch's batches, or a validation.

        Snapshots have the random state of this moment until batches are read or the epoch ends.
        """
        self._random_to_resume = rng.glance()

    def batches(
        self, loader: Any, limit: int | None, voting: Callable[[Iterator[Any]], Iterator[Any]] | None
    ) -> Iterator[tuple[int, Any, bool]]:
        """The batches of an epoch, each with its index and whether it is the last; begins where the fit resumes.

        The next batch is read before the one at hand is used, since nothing else says which is the last.

        Args:
            loader: this rank's batches.
            limit: how many there may be.
            voting: given the batches, returns those before which all ranks still have one; for ranks that do not know
                each other's number.
        """
        part, self.resume_from = self.resume_from, None
        resumed = part if part is not None and part["random_at_start"] is not None else None
        self.batches_read = 0 if resumed is None else resumed["batches"]
        if resumed is not None:
            rng.restore(resumed["random_at_start"])
            self._metrics.load_state_dict(resumed["metrics"])
        self._random_at_start, self._random_to_resume = rng.capture(), None
        coming: Iterator[tuple[int, Any]] = islice(enumerate(rng.iterate(loader)), limit)
        for _ in range(self.batches_read):
            next(coming, None)
        if resumed is not None:
            # The next batch was read before the last step drew random numbers.
            rng.restore(resumed["random_before_read"])
        if voting is not None:
            coming = voting(coming)
        self._random_before_read = rng.glance()
        following = next(coming, None)
        if resumed is not None:
            rng.restore(resumed["random"])
        while following is not None:
            index, batch = following
            self._random_to_resume = rng.glance()
            following = next(coming, None)
            yield index, batch, following is None

    def advance(self) -> None:
        """Count a batch as trained on: a fit that resumes from here begins with the next."""
        self.batches_read += 1
        self._random_before_read, self._random_to_resume = self._random_to_resume, None

    def end_epoch(self) -> None:
        """Forget the epoch, whose validation is over: a fit that resumes from here begins with the next."""
        self.batches_read = 0
        self._random_at_start = self._random_before_read = self._random_to_resume = None
        self._metrics.metrics.clear()
