"""Uneven inputs with Transformers: :class:`JoinTrainer`, and :class:`JoinTrainerMixin` for subclasses of ``Trainer``.

::

    JoinTrainer(model, args, train_dataset=stream_of_this_rank, eval_dataset=another).train()

    class MyTrainer(JoinTrainerMixin, SFTTrainer): ...

Each rank reads its own stream, as long as it is: nothing is dispatched, cut off or repeated. What makes a training
exact is Transformers' own arithmetic, which already counts tokens over a window of accumulation on all ranks, once the
ranks run the same windows::

    rank with batches                                rank that has run out
    -----------------                                ---------------------
    roll call of ``Join.iterate``                    the same
    a window of up to k micro-batches, and as many   a window of k dummies, the last batch with loss 0
      dummies as are missing
    all-gather of the numbers of tokens; where none  the same, with 0
      are counted, all-reduce of micro-batches
    micro-batches, then dummies: forward, backward;  the same; it reduces nothing but zeros
      the last one reduces gradients
    clip, step, log, evaluate, save                  the same

An evaluation in the midst of it is a loop of its own, over a process group of its own. What is gathered in each
of its steps has the rows of ranks with data, and none of dummies, so the loss is the mean over the batches of all
ranks, as it is in one process.

Transformers has Accelerate prepare its loaders, which spreads one stream over all ranks. Here each rank has its own,
and its loader is prepared as that of one process is: batches go to the device, and that is all.

Tried on Transformers 5.23.0 with Accelerate 1.15.0.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from join import Join, JoinReport
from join.batch import samples_in, tensors_in
from join.collectives import collective_of
from join.loop import emptied, length_of
from joinables.integrations.accelerate import check_accelerator, check_wrapping, counting_no_dummies, scaling_losses
from joinables.modules import replaced
from joinables.wrapped import unwrapped

__all__ = ["JoinTrainer", "JoinTrainerMixin"]

_Base: Any = Any if TYPE_CHECKING else object
try:
    _library: Any = importlib.import_module("transformers")
except ImportError as missing:
    raise ImportError("JoinTrainer needs Transformers: pip install 'joinables[transformers]' [J133]") from missing

HOOKS = (
    "_get_num_items_in_batch",
    "_init_training_state",
    "_run_epoch",
    "_track_num_input_tokens",
    "evaluation_loop",
    "get_batch_samples",
    "set_initial_training_values",
    "training_step",
)
"""Methods of the Trainer that are overridden or called, and must be there."""
PREPARED = "_is_accelerate_prepared"
"""Accelerate's mark on a model."""


class JoinTrainerMixin(_Base):
    """Lets ranks train and evaluate on streams of different lengths, with the result of one process.

    List it first: ``class MyTrainer(JoinTrainerMixin, SFTTrainer)``, with any subclass of ``Trainer``. All arguments
    are the Trainer's. An ``IterableDataset`` is read by each rank as it is, so give each rank its own; of a map-style
    data set each rank reads its share, of which no sample is repeated. With DDP or FSDP2; in one process it is the
    Trainer that it is mixed into.

    The loss of a window of accumulation is the mean over the tokens that all ranks have in it, or over micro-batches
    where the model counts no tokens. A window at the end of an epoch that is not full makes a step, too. ``max_steps``
    counts optimizer steps, which all ranks make. Where a subclass has a ``training_step`` of its own, it calls
    ``super().training_step``; where it keeps sums of its own, it asks :attr:`shadowing`.

    An exception in the loop, in a callback too, is raised on its rank, and :class:`join.PeerError` on the others.

    Attributes:
        join_report: who had how many micro-batches in the last epoch; ``None`` before that, and in one process.

    Raises:
        TypeError: on defining a class where it does not come before ``Trainer``.
        ImportError: on defining a class with a Trainer that it does not know.
        ValueError: in ``train``, for arguments that do not fit uneven ranks.
    """

    join_report: JoinReport | None = None
    _windows: Windows | None = None  # of the epoch under way
    _batches_per_rank = 0.0  # in the window under way, on average and without dummies
    _evaluation_group: dist.ProcessGroup | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        trainers = [base for base in order if issubclass(base, _library.Trainer)]
        before = order[: order.index(JoinTrainerMixin)]
        if not trainers or any(base in before and not issubclass(base, JoinTrainerMixin) for base in trainers):
            raise TypeError(
                f"{cls.__name__} must list JoinTrainerMixin before transformers.Trainer, or a subclass of it: class"
                f" {cls.__name__}(JoinTrainerMixin, Trainer) [J134]"
            )
        missing_hooks = [name for name in HOOKS if not hasattr(_library.Trainer, name)]
        if missing_hooks:
            raise ImportError(
                f"JoinTrainer does not know the Trainer of Transformers {_library.__version__}, which has no"
                f" {missing_hooks[0]}; install transformers 5.23 [J135]"
            )

    @property
    def shadowing(self) -> bool:
        """Whether the batch in hand is a dummy, which must not count; its loss is 0 already."""
        return self._windows is not None and self._windows.join.shadowing

    @property
    def _plain(self) -> Any:
        """The Trainer that this is mixed into, without this."""
        return super()

    # -- data ---------------------------------------------------------------------------------------------------------

    def get_train_dataloader(self) -> Any:
        """The loader of this rank's own stream, or of its share of a map-style data set."""
        with own_streams(self.accelerator):
            loader = self._plain.get_train_dataloader()
        sampler: Any = getattr(loader, "batch_sampler", None)
        if hasattr(sampler, "even_batches"):
            sampler.even_batches = False  # the shares may be uneven, instead of repeating samples until they are even
        return loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The loader of this rank's own stream; that of a map-style data set is the Trainer's."""
        with own_streams(self.accelerator):
            return self._plain.get_eval_dataloader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """The loader of this rank's own stream; that of a map-style data set is the Trainer's."""
        with own_streams(self.accelerator):
            return self._plain.get_test_dataloader(test_dataset)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """How long an epoch is: as long as that of the rank with most batches, and the last window full."""
        length = length_on_all_ranks(dataloader) if self._is_distributed else None
        if length is not None:
            size = args.gradient_accumulation_steps
            dataloader = LoaderOfLength(dataloader, -(-length // size) * size)
        return self._plain.set_initial_training_values(args, dataloader)

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, resume: Any, trial: Any
    ) -> tuple[int, int]:
        """Where to go on: also in the n-th epoch of a stream, which a Trainer takes for the first one."""
        start = self._plain._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, resume, trial)
        file = Path(resume or "", "trainer_state.json")
        if resume is None or num_update_steps_per_epoch != max_steps or not self._is_distributed or not file.is_file():
            return start
        saved = _library.TrainerState.load_from_json(str(file))
        part, epoch = math.modf(saved.epoch or 0.0)
        if self.args.ignore_data_skip:
            return int(epoch), 0
        return int(epoch), round(part * saved.max_steps * self.args.gradient_accumulation_steps)

    # -- training -----------------------------------------------------------------------------------------------------

    def _run_epoch(self, model: Any, *arguments: Any, **named: Any) -> None:
        if not self._is_distributed:
            self._plain._run_epoch(model, *arguments, **named)
            return
        self._check_arguments(model)
        size = self.args.gradient_accumulation_steps
        join = Join([model, self.optimizer, self.lr_scheduler], loss_divided_by=size)
        self._windows = Windows(join, size)
        try:
            with join:
                self._plain._run_epoch(model, *arguments, **named)
                self._windows.end()
        finally:
            self._windows = None
        self.join_report = join.report

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        """The micro-batches of a window, with dummies where other ranks have more; and how many tokens all have."""
        windows = self._windows
        if windows is None:
            return self._plain.get_batch_samples(epoch_iterator, num_batches, device)
        batches = windows.begin(epoch_iterator)
        if not batches:
            return [], None
        num_items = self._get_num_items_in_batch(
            [without_labels(batch) for batch in batches] if windows.join.shadowing else batches, device
        )
        if num_items is not None:  # if there is nothing to learn in the window of any rank, gradients are 0
            num_items = num_items.clamp(min=1)
        else:
            count = torch.tensor(0 if windows.join.shadowing else len(batches), device="cpu")
            windows.join.collective.all_reduce(count).wait()
            self._batches_per_rank = int(count) / self.args.world_size
        return windows, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward of a micro-batch; of a dummy, the loss is 0, and what it gathers has no rows."""
        if self._windows is None:
            return self._plain.training_step(model, inputs, num_items_in_batch)
        if num_items_in_batch is None:  # the mean over ranks is then that over the micro-batches there are
            self.current_gradient_accumulation_steps = self._batches_per_rank
        join = self._windows.join
        with counting_no_dummies(self.accelerator, join), scaling_losses(self.accelerator, join):
            loss = self._plain.training_step(model, inputs, num_items_in_batch)
        return torch.zeros_like(loss) if join.shadowing else loss

    def floating_point_ops(self, inputs: Any) -> int:
        """The operations of a micro-batch; 0 for a dummy."""
        return 0 if self.shadowing else self._plain.floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self._plain._track_num_input_tokens(emptied(inputs) if self.shadowing else inputs)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **named: Any) -> Any:
        """Evaluate or predict: over streams in step with the other ranks, over a map-style data set as a Trainer."""
        # The model is prepared as it is, and marked as that: a training after it would find it prepared, without DDP.
        is_marked = self.is_fsdp_enabled or PREPARED in vars(self.model)
        try:
            if not (self._is_distributed and is_stream(dataloader)):
                return self._plain.evaluation_loop(dataloader, *arguments, **named)
            return self._evaluate_streams(dataloader, *arguments, **named)
        finally:
            if not is_marked:
                vars(self.model).pop(PREPARED, None)

    def _evaluate_streams(self, batches: Any, *arguments: Any, **named: Any) -> Any:
        """The Trainer's own loop over this rank's batches and, after these, as many dummies as needed."""
        group = None  # within an epoch, its block is open on the default one
        if self._windows is not None:
            if self._evaluation_group is None:
                self._evaluation_group = cast("dist.ProcessGroup", dist.new_group())
            group = self._evaluation_group
        samples = torch.tensor(0, device="cpu")

        def counted() -> Iterator[Any]:
            for batch in join.iterate(batches, dummy="last"):
                samples.add_(0 if join.shadowing else samples_in(batch))
                yield batch

        with (
            Join([], process_group=group) as join,
            counting_no_dummies(self.accelerator, join),
            replaced(self, "gather_function", self.accelerator.gather_for_metrics),
            replaced(self.args, "average_tokens_across_devices", False),  # each batch has its own mean
        ):
            output = self._plain.evaluation_loop(counted(), *arguments, **named)
            join.collective.all_reduce(samples).wait()
        return output._replace(num_samples=int(samples))

    # -- checks -------------------------------------------------------------------------------------------------------

    @property
    def _is_distributed(self) -> bool:
        return self.args.world_size > 1

    def _check_arguments(self, model: Any) -> None:
        check_accelerator(self.accelerator, "JoinTrainer")
        check_wrapping(unwrapped(model), "give the Trainer the plain one")
        args = self.args
        if not args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False weighs each rank's mean alike, also that of no tokens; leave it"
                " True in TrainingArguments [J136]"
            )
        if args.accelerator_config.dispatch_batches:
            raise ValueError("dispatch_batches=True has rank 0 read for all; leave it out of accelerator_config [J137]")
        if args.auto_find_batch_size:
            raise ValueError(
                "auto_find_batch_size=True begins again on the rank that is out of memory, and not on the others; leave"
                " it out [J138]"
            )
        parallel = {"tensor": self.get_tp_size(), "context": self.get_cp_size(), "sequence": self.get_sp_size()}
        for name, size in parallel.items():
            if size > 1:
                raise ValueError(f"JoinTrainer cannot train with {name} parallelism; use DDP or FSDP2 [J139]")


# -- windows of accumulation ------------------------------------------------------------------------------------------


class JoinTrainer(JoinTrainerMixin, _library.Trainer):
    """A ``transformers.Trainer`` for streams of different lengths: ``JoinTrainer(model, args, ...)``, as that is made.

    What it does is told at :class:`JoinTrainerMixin`.
    """


class Windows:
    """An epoch's windows on this rank, filled up with dummies, all of one size; iterated over, the one under way.

    A micro-batch is a step of ``Join.iterate``, begun when it is asked for; those that follow in its window are known
    by then.

    Args:
        join: the block of the epoch.
        size: how many micro-batches make a window.
    """

    def __init__(self, join: Join, size: int) -> None:
        self.join, self._size = join, size
        self._steps: Iterator[Any] | None = None  # before the first
        self._first: list[Any] = []  # the first micro-batch of the window, if there is any

    def begin(self, batches: Iterator[Any]) -> list[Any]:
        """Begin the next window: what it has on this rank, or one dummy; empty if no rank has anything.

        Args:
            batches: this rank's, the same iterator in all windows.
        """
        if is_first := self._steps is None:
            self._steps = iter(self.join.iterate(batches, dummy="last", window=self._size, fill_window=True))
        self._first = list(islice(self._steps, 1))
        if is_first:
            warn_of_same_streams([] if self.join.shadowing else self._first)
        return self._first + ([] if self.join.shadowing else self.join.pending[: self._size - 1])

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Any]:
        assert self._steps is not None
        yield from self._first
        yield from islice(self._steps, self._size - 1)

    def end(self) -> None:
        """Go through the rest of a window in which the trainer has stopped."""
        while self._steps is not None and not self.join.ends_window:
            next(self._steps)


def without_labels(batch: Any) -> Any:
    """The batch with labels that count nowhere; the one given is not changed."""
    changed = copy.copy(batch)
    for name in ("labels", "shift_labels"):
        if name in batch and isinstance(batch[name], torch.Tensor):
            changed[name] = torch.full_like(batch[name], -100)
    return changed


# -- loaders ----------------------------------------------------------------------------------------------------------


def is_stream(loader: Any) -> bool:
    """Whether a loader, or what it is made of, is of an ``IterableDataset``."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def warn_of_same_streams(batch: Any) -> None:
    """Warn if ranks begin with the same batch: they read the same stream, and each sample counts several times.

    Args:
        batch: this rank's first one; an empty list without data. All ranks call this.
    """
    norms = [tensor.double().square().sum().item() for tensor in tensors_in(batch)]
    firsts = collective_of(None).all_gather_object(norms)
    ranks = [rank for rank, first in enumerate(firsts) if first and firsts.count(first) > 1]
    if ranks:
        warnings.warn(
            f"the train_dataset of ranks {ranks} begins with the same batch, and all train on it; give each another"
            " stream, such as datasets.distributed.split_dataset_by_node(stream, rank, world_size)",
            stacklevel=2,
        )


def own_streams(accelerator: Any) -> AbstractContextManager[None]:
    """A context in which ``accelerator`` prepares loaders of streams without spreading them over the ranks."""
    module: Any = importlib.import_module("accelerate.data_loader")
    spread = accelerator.prepare_data_loader

    def prepare(loader: Any, **placement: Any) -> Any:
        if accelerator.num_processes == 1 or not is_stream(loader):
            return spread(loader, **placement)
        loader = module.prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=1,
            process_index=0,
            put_on_device=accelerator.device_placement,
            dispatch_batches=False,
            non_blocking=accelerator.non_blocking,
            use_stateful_dataloader=accelerator.use_stateful_dataloader,
        )
        accelerator._dataloaders.append(loader)
        return loader

    return replaced(accelerator, "prepare_data_loader", prepare)


def length_on_all_ranks(loader: Any) -> int | None:
    """The number of batches of the rank with most; ``None`` if loaders have no length. All ranks ask.

    Raises:
        ValueError: on all ranks, if some loaders have a length and others do not.
    """
    lengths: list[int | None] = collective_of(None).all_gather_object(length_of(loader))
    known = [length for length in lengths if length is not None]
    if known and len(known) < len(lengths):
        without = [rank for rank, length in enumerate(lengths) if length is None]
        raise ValueError(
            f"the train_dataset of ranks {without} has no length, and that of others has; give all of them a __len__,"
            " or none [J132]"
        )
    return max(known) if known else None


class LoaderOfLength:
    """A loader as long as the longest one of all ranks, from which a Trainer computes how long an epoch is.

    Args:
        loader: this rank's.
        length: how many batches that one has.
    """

    def __init__(self, loader: Any, length: int) -> None:
        self.dataset, self._length = loader.dataset, length

    def __len__(self) -> int:
        return self._length
