"""Uneven inputs with Transformers: :class:`JoinTrainer`, and :class:`JoinTrainerMixin` for subclasses of ``Trainer``.

::

    JoinTrainer(model, args, train_dataset=stream_of_this_rank, eval_dataset=another).train()

    class MyTrainer(JoinTrainerMixin, SFTTrainer): ...

Each rank reads its own stream, of any length: nothing is dispatched, cut off or repeated. Training is exact because
Transformers' own arithmetic counts tokens over an accumulation window on all ranks, once the ranks run the same
windows::

    rank with batches                                rank that is out of data
    -----------------                                ------------------------
    roll call of ``Join.iterate``                    the same
    a window of up to k micro-batches: as many as    the same number of dummies, the last batch with
      the rank with most has; then dummies             loss 0
    all-gather of the numbers of tokens; where none  the same, with 0
      are counted, all-reduce of micro-batches
    micro-batches: forward, backward; the last       the same; it reduces nothing but zeros
      one reduces gradients
    clip, step, log, evaluate, save                  the same

A Trainer expects k micro-batches in each window, even if all ranks together have fewer. The missing micro-batches come
first, and run no forward and none of the user's code. So no metric can count them, and the last micro-batch, which
reduces gradients, has data.

An evaluation during an epoch is a loop of its own, over a process group of its own. The rows that are gathered in each
of its steps come from ranks with data only, so the loss is the mean over the batches of all ranks, as in a single
process.

Transformers has Accelerate prepare its loaders, and Accelerate distributes one stream over all ranks. Here each rank
has its own stream, and its loader is prepared as in a single process: batches go to the device, and nothing else.

Private names of Transformers and Accelerate: ``_dataloaders``, ``_get_num_items_in_batch``, ``_init_training_state``,
``_inner_training_loop``, ``_is_accelerate_prepared``, ``_maybe_log_save_evaluate``, ``_prepare_inputs``,
``_run_epoch``, ``_track_num_input_tokens``.

Tried on Transformers 4.57 with Accelerate 1.11, on 5.0, 5.3, 5.10 and 5.16, and on 5.20 to 5.24 with Accelerate 1.15.
"""

from __future__ import annotations

import copy
import importlib
import math
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from join import Join, JoinReport
from join.batch import emptied, samples_in, tensors_in
from join.collectives import collective_of
from join.collectives._torch_private import pytree
from join.mean import mean_over_ranks
from join.read_ahead import length_of
from joinables.integrations import Loader, framework, in_words_of, refuse_options, warn_if_alone
from joinables.integrations.accelerate import check_accelerator, counting_no_dummies, gather_rows, scaling_losses
from joinables.modules import keeping_modes, replaced, with_methods

__all__ = ["JoinTrainer", "JoinTrainerMixin"]

_Base: Any = Any if TYPE_CHECKING else object
_library = framework("transformers")

HOOKS = (
    "_get_num_items_in_batch",
    "_inner_training_loop",
    "_maybe_log_save_evaluate",
    "_prepare_inputs",
    "get_batch_samples",
    "set_initial_training_values",
)
"""Names of the Trainer that this class overrides or reads, so they must exist."""
PREPARED = "_is_accelerate_prepared"
"""Name of Accelerate's mark on a model."""
LOG_ONLY = {"DPOTrainer", "KTOTrainer", "RewardTrainer"}
"""Trainers of TRL that use the result of ``accelerator.gather`` for logs only."""
REFUSED = {
    "average_tokens_across_devices=False": "the mean of a rank without tokens counts like that of any other",
    "auto_find_batch_size=True": "the training starts again only on the rank that is out of memory",
    "enable_jit_checkpoint=True": "each rank saves and stops by a clock of its own",
    "use_legacy_prediction_loop=True": "ranks evaluate different numbers of batches",
    "dispatch_batches=True": "rank 0 reads for all ranks",
    "split_batches=True": "ranks share the batches of one stream",
}
"""Options of a Trainer that cannot hold, and why."""
STOP = "To stop, set the flags of TrainerControl on all ranks in the same step, by a value that all ranks have."
ADVICE = {
    "J067 J555": "Return tensors in lists, tuples, dicts or dataclasses from the data_collator.",
    "J089": "Call the model only in the thread that called train, and only in its steps.",
    "J092 J810": STOP,
    "J093": f"Call super().training_step for every batch. {STOP}",
    "J421": "Call the model in training_step, or before or after train().",
    "J441": "Change parameters, gradients and learning rates alike on all ranks, even if self.shadowing is true.",
    "J460 J461": "Call self.accelerator.backward(loss) for every loss.",
    "J471": "Remove no_sync from training_step, which the Trainer calls in it.",
    "J521": "Call self.accelerator.gather_for_metrics. Of TRL's trainers, use SFT-, DPO-, KTO- or RewardTrainer.",
    "J536": "Remove it from the DistributedDataParallelKwargs or from the model.",
    "J822": "Let the loader yield copies of its batches.",
}
"""By the codes of errors whose advice users of a Trainer cannot follow: the advice that replaces it."""


class JoinTrainerMixin(_Base):
    """Mixin that lets ranks train and evaluate on streams of different lengths, with the result of a single process.

    List it first: ``class MyTrainer(JoinTrainerMixin, SFTTrainer)``, with any subclass of ``Trainer``. All arguments
    are the Trainer's. Each rank reads its ``IterableDataset`` as it is, so pass each rank a stream of its own. Of a
    map-style data set, each rank reads its share, and no sample is repeated. The mixin works with DDP or FSDP2. In a
    single process, the class behaves like the Trainer that it is mixed into.

    The loss of an accumulation window is the mean over the tokens that all ranks have in it, or over micro-batches if
    the model counts no tokens. A window at the end of an epoch that is not full makes a step, too. ``max_steps`` counts
    optimizer steps, which all ranks make. A ``training_step`` of a subclass calls ``super().training_step``. If it
    keeps sums of its own, it checks :attr:`shadowing`.

    An exception in the loop or in a callback is raised on its rank, and :class:`join.PeerError` on the others.

    Attributes:
        join_report: The numbers of micro-batches of all ranks in the last epoch; ``None`` before the first, and in a
            single process.

    Raises:
        TypeError: On the definition of a class that does not list the mixin before ``Trainer``.
        ImportError: On the definition of a class, if Transformers has an unknown Trainer.
        ValueError: In ``train``, for arguments that do not work with uneven ranks.
    """

    join_report: JoinReport | None = None
    _training: ExitStack  # undoes the changes of a training of several ranks
    _epoch: ExitStack | None = None  # ends the block of the current epoch; None outside such a training
    _windows: MicroBatchWindows | None = None  # the windows of the current epoch
    _length: int | None = None  # the number of batches in an epoch, on the rank with most; None if it is unknown
    _loss_counts: bool | None = None  # whether the loss depends on the number of tokens; None before that is known
    _batches_per_rank = 0.0  # the mean number of batches in the current window, without dummies
    _evaluation_group: dist.ProcessGroup | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        plain = [issubclass(base, _library.Trainer) and not issubclass(base, JoinTrainerMixin) for base in order]
        if True not in plain[order.index(JoinTrainerMixin) :] or True in plain[: order.index(JoinTrainerMixin)]:
            raise TypeError(
                f"{cls.__name__} does not list JoinTrainerMixin before transformers.Trainer, or has no Trainer. Define"
                f" it as class {cls.__name__}(JoinTrainerMixin, Trainer). [J134]"
            )
        for name in (name for name in HOOKS if not hasattr(_library.Trainer, name)):
            raise ImportError(
                f"The Trainer of Transformers {_library.__version__} has no {name}, which JoinTrainer needs. Install a"
                " version that it was tried with. [J135]"
            )

    @property
    def shadowing(self) -> bool:
        """Whether the current batch is a dummy, which must not count; its loss is 0 already."""
        return self._windows is not None and (self._windows.fills or self._windows.join.shadowing)

    @property
    def _plain(self) -> Any:
        """Trainer that this class is mixed into, without the mixin's methods."""
        return super()

    # -- data ---------------------------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that does not distribute the loader of a stream over the ranks."""
        self._plain.create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_data_loader
        self.accelerator.prepare_data_loader = partial(prepare_loader, self.accelerator, prepare)

    def get_train_dataloader(self) -> Any:
        """Return the loader of this rank's own stream, or of its share of a map-style data set."""
        loader = self._plain.get_train_dataloader()
        if is_share(loader):
            loader.batch_sampler.even_batches = False  # otherwise it would repeat samples until the shares are even
        return loader

    def set_initial_training_values(self, args: Any, dataloader: Any, *more: Any) -> tuple[Any, ...]:
        """Compute the values from the length of the longest loader and the samples of all ranks."""
        if self._epoch is None:
            return self._plain.set_initial_training_values(args, dataloader, *more)
        length = length_of(dataloader)
        samples = 0 if length is None else self.num_examples(dataloader)
        ranks = collective_of(None).all_gather_object((length, samples), plain=True)
        lengths = [length for length, _ in ranks]
        self._length = None if None in lengths else max(lengths)
        self._training.callback(with_methods(dataloader, {"__len__": Loader(dataloader, self._length).__len__}))
        if not is_share(dataloader):
            samples = sum(samples for _, samples in ranks)

        def num_examples(_: Any) -> int:
            return samples

        with replaced(self, "num_examples", num_examples):
            return self._plain.set_initial_training_values(args, dataloader, *more)

    def _init_training_state(self, max_steps: int, steps: int, epochs: int, checkpoint: Any, *more: Any) -> Any:
        """Return the epoch, and the number of batches in it that were trained before the checkpoint.

        The Trainer divides the steps of a checkpoint by the steps of an epoch. For streams without a length, an epoch
        has ``max_steps``, so the epoch would always be the first. The checkpoint has the right one.
        """
        position = self._plain._init_training_state(max_steps, steps, epochs, checkpoint, *more)
        file = Path(checkpoint or "", "trainer_state.json")
        if self._epoch is None or self._length is not None or checkpoint is None or not file.is_file():
            return position
        saved = _library.TrainerState.load_from_json(str(file))
        part, epoch = math.modf(saved.epoch or 0.0)
        skipped = 0 if self.args.ignore_data_skip else round(part * saved.max_steps)
        return int(epoch), skipped * self.args.gradient_accumulation_steps

    # -- training -----------------------------------------------------------------------------------------------------

    def _inner_training_loop(self, *arguments: Any, **named: Any) -> Any:
        if self.args.world_size == 1:
            warn_if_alone("JoinTrainer", self.args.world_size, "Without GPUs, pass use_cpu=True to TrainingArguments.")
            return self._plain._inner_training_loop(*arguments, **named)
        self._check_arguments(resumes=named.get("resume_from_checkpoint") is not None)
        # The Trainer divides losses by this number itself. In Transformers 5.3, Accelerate would divide them again.
        accelerator, size = self.accelerator, self.accelerator.gradient_accumulation_steps
        accelerator.gradient_accumulation_steps = 1
        handler = self.callback_handler
        on_epoch_end = handler.on_epoch_end

        def after_epoch(*args: Any, **kwargs: Any) -> Any:
            cast("ExitStack", self._epoch).close()
            return on_epoch_end(*args, **kwargs)

        try:
            with in_words_of(ADVICE), ExitStack() as self._training, ExitStack() as self._epoch:
                self._training.enter_context(replaced(handler, "on_epoch_end", after_epoch))
                return self._plain._inner_training_loop(*arguments, **named)
        finally:
            self._epoch = None
            accelerator.gradient_accumulation_steps = size

    @contextmanager
    def _block(self, batches: Iterator[Any]) -> Generator[None]:
        """Return the block of an epoch with these batches."""
        size = self.args.gradient_accumulation_steps
        try:
            with Join([self.model_wrapped, self.optimizer, self.lr_scheduler], loss_divided_by=size) as join:
                self._windows = MicroBatchWindows(self, join, batches)
                yield
                self._windows.end()
        finally:
            self._windows = None
        self.join_report = join.report

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[Any, Any]:
        """Return the window's micro-batches, filled up to ``num_batches``, and the number of tokens on all ranks."""
        if self._epoch is None:
            return self._plain.get_batch_samples(epoch_iterator, num_batches, device)
        if self._windows is None:
            self._epoch.enter_context(self._block(islice(epoch_iterator, self._length)))
        windows = cast("MicroBatchWindows", self._windows)
        batches = windows.begin(num_batches)
        if not batches:
            return [], None
        may_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if self._loss_counts is None and may_count and "labels" in batches[0]:
            self._loss_counts = self._find_whether_loss_counts(windows.join, self._prepare_inputs(batches[0]))
        num_items = None
        if self._loss_counts is not False:
            num_items = self._get_num_items_in_batch(
                [without_labels(batch) for batch in batches] if windows.join.shadowing else batches, device
            )
        if num_items is not None:  # it is 0 if no rank has tokens to learn in the window; gradients are 0 then
            num_items = num_items.clamp(min=1)
        else:
            count = torch.tensor(0 if windows.join.shadowing else len(batches), device="cpu")
            windows.join.collective.all_reduce(count).wait()
            self._batches_per_rank = int(count) / self.args.world_size
        return windows, num_items

    def _find_whether_loss_counts(self, join: Join, inputs: Any) -> bool | None:
        """Return whether the loss depends on ``num_items_in_batch``; ``None`` if this batch does not show it.

        Many models and many a ``compute_loss`` take the number and ignore it. Their loss is a mean over the batch. All
        ranks call this, each with a batch. ``compute_loss`` runs twice, on a copy of the Trainer whose ``log`` takes
        anything and does nothing.
        """
        if (is_scaled := getattr(self, "loss_is_scaled_for_ga", None)) is not None:  # Transformers 5.20 has it
            return is_scaled
        model = self.accelerator.unwrap_model(self.model_wrapped, keep_torch_compile=False)
        devices = {each.device for each in tensors_in(inputs) if not each.is_cpu}
        losses: list[Any] = []
        with keeping_modes(model), self._counting_no_dummies(join), torch.set_grad_enabled(not self.is_fsdp_enabled):
            model.eval()  # without dropout, and without changes of buffers
            for number in torch.arange(1, 3, device=self.args.device):
                trial = cast("Any", copy.copy(self))
                trial.__dict__ = {**pytree.tree_map(torch.nn.Identity(), vars(self)), "log": torch.nn.Identity}
                with torch.random.fork_rng(devices):
                    losses.append(trial.compute_loss(model, {**inputs}, num_items_in_batch=number))
        is_shown = all(bool(loss.isfinite()) and bool(loss) for loss in losses)
        found = torch.tensor([is_shown, is_shown and not torch.equal(*losses)], dtype=torch.int64, device="cpu")
        collective_of(None).all_reduce(found, "max").wait()
        is_shown, differs = map(bool, found)
        return differs if is_shown else None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run forward and backward of a micro-batch; a dummy has the loss 0, and its gathered tensors have no rows."""
        windows = self._windows
        if windows is None:
            return self._plain.training_step(model, inputs, num_items_in_batch)
        as_usual, divisor = self.compute_loss_func, 1.0
        if num_items_in_batch is None:  # the mean over ranks then equals the mean over their micro-batches
            divisor = self.current_gradient_accumulation_steps = self._batches_per_rank

        def divided(*arguments: Any, **named: Any) -> Any:
            return as_usual(*arguments, **named) / divisor

        with (
            self._counting_no_dummies(windows.join),
            scaling_losses(self.accelerator, windows.scale),
            replaced(self, "compute_loss_func", as_usual and divided),  # a Trainer does not divide its loss
        ):
            loss = self._plain.training_step(model, inputs, num_items_in_batch)
        return torch.zeros_like(loss) if self.shadowing else loss

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *arguments: Any, **named: Any) -> None:
        if self._epoch is not None and self._windows is None:  # at the end of an epoch
            # It has the losses since the last log. When the training ends, the Trainer adds it to means over ranks.
            tr_loss.copy_(mean_over_ranks(collective_of(None), tr_loss, 1.0))
        self._plain._maybe_log_save_evaluate(tr_loss, *arguments, **named)

    def _counting_no_dummies(self, join: Join) -> AbstractContextManager[None]:
        only_logs = not LOG_ONLY.isdisjoint(base.__name__ for base in type(self).__mro__)
        return counting_no_dummies(self.accelerator, join, gather=partial(gather_rows, join) if only_logs else None)

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of a micro-batch; 0 for a dummy."""
        return 0 if self.shadowing else self._plain.floating_point_ops(inputs)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        self._plain._track_num_input_tokens(emptied(inputs) if self.shadowing else inputs)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def evaluation_loop(self, dataloader: Any, *arguments: Any, **named: Any) -> Any:
        """Evaluate or predict: over streams in the same steps on all ranks, over map-style data sets as a Trainer."""
        # An evaluation marks the unwrapped model as prepared. A later training would then skip DDP.
        with nullcontext() if self.is_fsdp_enabled else replaced(self.model, PREPARED, hasattr(self.model, PREPARED)):
            if self.args.world_size == 1 or not is_stream(dataloader):
                return self._plain.evaluation_loop(dataloader, *arguments, **named)
            return self._evaluate_streams(dataloader, *arguments, **named)

    def _evaluate_streams(self, batches: Any, *arguments: Any, **named: Any) -> Any:
        """Run the Trainer's own loop over this rank's batches, followed by as many dummies as needed."""
        group = None  # the default group, unless the block of an epoch is open on it
        if self._windows is not None:
            group = self._evaluation_group = self._evaluation_group or cast("dist.ProcessGroup", dist.new_group())
        samples = torch.tensor(0, device="cpu")
        # A Trainer joins the rows of steps only if they are tensors; a list of objects would lose some.
        objects = self.args.eval_use_gather_object and not self.args.eval_do_concat_batches

        def counted() -> Iterator[Any]:
            for batch in join.iterate(batches, dummy="last"):
                samples.add_(0 if join.shadowing else samples_in(batch))
                yield batch

        with (
            in_words_of(ADVICE),
            Join([], process_group=group) as join,
            self._counting_no_dummies(join),
            replaced(self, "gather_function", partial(self.accelerator.gather_for_metrics, use_gather_object=objects)),
            replaced(self.args, "average_tokens_across_devices", False),  # each batch has its own mean
        ):
            output = self._plain.evaluation_loop(counted(), *arguments, **named)
            join.collective.all_reduce(samples).wait()
        return output._replace(num_samples=int(samples))

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_arguments(self, *, resumes: bool) -> None:
        check_accelerator(self.accelerator, "JoinTrainer")
        args, streams = self.args, isinstance(self.train_dataset, IterableDataset)
        refuse_options(REFUSED, cast("dict[str, Any]", vars(args)), "TrainingArguments")
        config: dict[str, Any] = {**vars(args.accelerator_config), **({} if streams else {"split_batches": False})}
        refuse_options(REFUSED, config, "accelerator_config")
        counts = args.include_num_input_tokens_seen not in ("no", False)
        # Before Transformers 5.3 the whole training of a Trainer is one method.
        if not hasattr(_library.Trainer, "_run_epoch") and (counts or (resumes and streams)):
            raise ValueError(
                f"{'include_num_input_tokens_seen' if counts else 'resume_from_checkpoint'} would count dummies, or not"
                f" find the epoch of a stream, in Transformers {_library.__version__}. Remove it, or install"
                " transformers 5.3 or newer. [J763]"
            )
        sizes = getattr(self.accelerator, "parallelism_config", None)
        context, sequence = (getattr(sizes, name, 1) for name in ("cp_size", "sp_size"))
        for name, size in {"tensor": self.get_tp_size(), "context": context, "sequence": sequence}.items():
            if size > 1:
                raise ValueError(f"JoinTrainer cannot train with {name} parallelism. Use DDP or FSDP2. [J139]")


class JoinTrainer(JoinTrainerMixin, _library.Trainer):
    """A ``transformers.Trainer``, with its arguments, for streams of different lengths.

    :class:`JoinTrainerMixin` describes it.
    """


# -- accumulation windows ---------------------------------------------------------------------------------------------


class MicroBatchWindows:
    """Accumulation windows of an epoch on this rank.

    The object iterates over the current window. A micro-batch is a step of ``Join.iterate`` that begins when it is
    requested; the batches that follow in its window have been read by then.

    Args:
        trainer: The Trainer.
        join: The block of the epoch.
        batches: This rank's batches.
    """

    def __init__(self, trainer: Any, join: Join, batches: Iterator[Any]) -> None:
        self.join, self._trainer, self._size = join, trainer, trainer.args.gradient_accumulation_steps
        self._batches = batches
        self._steps: Iterator[Any] | None = None  # None before the first window
        self._first: list[Any] = []  # the window's first micro-batch, if it has any
        self._length = self._missing = 0  # the number of steps in the window, and of micro-batches that run before them
        self.fills = False
        """Whether the current micro-batch is one that no rank has."""

    def begin(self, expected: int) -> list[Any]:
        """Begin the next window and return its batches on this rank, or one dummy; empty if no rank has any.

        Args:
            expected: The number of micro-batches that the Trainer expects.
        """
        if is_first := self._steps is None:
            self._steps = iter(self.join.iterate(self._batches, dummy="last", window=self._size))
        self._first = list(islice(self._steps, 1))
        if is_first:
            warn_of_same_streams([] if self.join.shadowing else self._first)
        if self._first:  # without weights, each rank weighs 1 in each step of a window
            self._length = int(self.join.channel.place.step.total) // self.join.collective.world_size
            self._missing = max(expected - self._length, 0)
        return self._first + ([] if self.join.shadowing else self.join.pending[: self._size - 1])

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Scale a loss, which the Trainer has divided by the tokens or micro-batches of the window: by 1, or by 0."""
        return self.join.scale(loss * (self._length / self._size))

    def __len__(self) -> int:
        return self._missing + self._length

    def __iter__(self) -> Iterator[Any]:
        assert self._steps is not None
        self.fills = True
        with replaced(self._trainer, "training_step", self._without_loss):
            yield from self._first * self._missing
        self.fills = False
        yield from self._first
        yield from islice(self._steps, self._length - 1)

    def _without_loss(self, *_: Any) -> torch.Tensor:
        return torch.zeros((), device=self._trainer.args.device)

    def end(self) -> None:
        """Run the remaining steps of a window in which the trainer has stopped."""
        while self._steps is not None and not self.join.ends_window:
            next(self._steps)


def without_labels(batch: Any) -> Any:
    """Return a copy of the batch whose labels count nowhere; the passed batch does not change."""
    changed = copy.copy(batch)
    for name in ("labels", "shift_labels"):
        if name in batch and isinstance(batch[name], torch.Tensor):
            changed[name] = torch.full_like(batch[name], -100)
    return changed


# -- loaders ----------------------------------------------------------------------------------------------------------


def is_share(loader: Any) -> bool:
    """Return whether Accelerate distributes the samples of a loader over the ranks."""
    return hasattr(getattr(loader, "batch_sampler", None), "even_batches")


def is_stream(loader: Any) -> bool:
    """Return whether a loader, or the loader that it wraps, reads an ``IterableDataset``."""
    return isinstance(getattr(loader, "dataset", None), IterableDataset)


def warn_of_same_streams(batch: Any) -> None:
    """Warn if ranks begin with the same batch: they read the same stream, and each sample counts several times.

    All ranks call this.

    Args:
        batch: This rank's first batch; an empty list without data.
    """
    norms = [tensor.double().square().sum().item() for tensor in tensors_in(batch)]
    firsts = collective_of(None).all_gather_object(norms, plain=True)
    ranks = [rank for rank, first in enumerate(firsts) if first and firsts.count(first) > 1]
    if ranks:
        warnings.warn(
            f"The train_dataset of ranks {ranks} begins with the same batch, and all of them train on it. Pass each"
            " rank a different stream, such as datasets.distributed.split_dataset_by_node(stream, rank, world_size).",
            stacklevel=2,
        )


def prepare_loader(accelerator: Any, as_usual: Callable[..., Any], loader: Any, **placement: Any) -> Any:
    """Prepare a loader. A stream is this rank's own, so its loader is prepared as in a single process."""
    if accelerator.num_processes == 1 or not is_stream(loader):
        return as_usual(loader, **placement)
    module: Any = importlib.import_module("accelerate.data_loader")
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
