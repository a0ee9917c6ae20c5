"""Uneven inputs with Accelerate: :func:`join_uneven_inputs`, which replaces ``accelerator.join_uneven_inputs``.

::

    with join_uneven_inputs(accelerator, [model, optimizer, scheduler], even_batches=False) as join:
        for x, y in join.iterate(loader):       # or, with DDP, loader
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

Accelerate's own context works with DDP on GPUs only, and not with an optimizer that shards, with accumulation, or with
FSDP. This one is a :class:`join.Join` of the prepared objects, as they are, on any backend.

In the block, ``accelerator.backward`` scales each loss by the weight of its batch. Accelerate divides each loss by
``gradient_accumulation_steps``, even in accumulation windows that are not full. So the block receives that number as
``loss_divided_by``.

A loop over ``join.iterate`` reads ahead, so Accelerate's own loader reports its end too early, and at a different step
on each rank. In such a loop the block replaces this report: ``accelerator.accumulate``, ``end_of_dataloader`` and a
saved loader's state follow the block, whose accumulation windows end at the same step on all ranks. In a plain loop,
each rank's window ends with its own loader, and the last reductions have fewer micro-batches.

A dummy batch is the rank's last batch itself, with weight 0, since the loop body of a script for a framework seldom
expects empty batches. So the rows that a rank with a dummy passes to ``gather_for_metrics`` are dropped, and so are its
losses in ``reduce``. Other values are refused if they may be of several batches, or of an evaluation.

Private names of Accelerate: ``_dataloaders``, ``_do_sync``, ``_iterator_finished``.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import torch
from typing_extensions import Self, override

from join import Join, JoinError
from join.batch import PLAIN, Step, map_tensors, samples_in, tensors_in
from join.collectives import SingleCollective
from join.collectives._torch_private import pytree
from join.errors import advise
from join.loop import Batches
from join.transfer import gather_trees
from joinables.integrations import framework, in_words_of, refuse_options, warn_if_alone
from joinables.modules import replaced, with_methods

__all__ = ["AcceleratedJoin", "check_accelerator", "gather_rows", "join_uneven_inputs"]

T = TypeVar("T")

_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "FSDP")
ADVICE = {
    "J013": "List the prepared model. For a compiled model, pass keep_torch_compile=False to accelerator.unwrap_model.",
    "J460 J461": "Call accelerator.backward(loss) for every loss of the loop.",
}
"""By the codes of errors whose advice users of Accelerate cannot follow: the advice that replaces it."""
REFUSED = {
    "sync_each_batch=True": "each micro-batch is reduced by itself, so gradients cannot be the mean over the window",
    "sync_with_dataloader=False": "a window continues in the next epoch, but the windows of a block end with it",
}
"""Options of ``GradientAccumulationPlugin`` that cannot hold, and why."""


def join_uneven_inputs(
    accelerator: Any, joinables: Iterable[Any], even_batches: bool | None = None, **arguments: Any
) -> Join:
    """Return a block in which ranks may have different numbers of batches, for objects that Accelerate has prepared.

    Gradients are the mean over the micro-batches of all ranks; call ``accelerator.backward`` for each loss. Each
    micro-batch weighs 1, unless ``join.iterate(weigh=...)`` or, in a plain loop, ``join.weight`` sets another weight.
    In a single process this holds in a loop over ``join.iterate``. In a plain loop the loss stays as Accelerate scales
    it.

    A loop over ``join.iterate`` has accumulation windows of ``gradient_accumulation_steps``, for
    ``accelerator.accumulate``. Pass another ``window`` if the loop needs one.

    Under ``accelerator.accumulate`` in a plain loop, the window at the end of a rank's loader may not be full. It makes
    a step only if the loader is a prepared one, which reports its end to Accelerate, and the model is not sharded. In a
    loop over ``join.iterate``, any loader and any model work. To prepare a stream of this rank's own, call
    ``accelerate.data_loader.prepare_data_loader(loader, num_processes=1, process_index=0)``.

    In a loop over ``join.iterate``, ``accelerator.gather_for_metrics`` returns the rows of all ranks that have data,
    even if their numbers of rows differ. ``accelerator.reduce`` reduces a loss of the step over these ranks, and raises
    for other values. ``accelerator.gather`` raises, since its result would contain rows of dummies. In a plain loop all
    three raise, since ranks without data never call them. Dummies are ``dummy="last"`` by default, but ``"empty"`` if
    the model has SyncBatchNorm.

    Args:
        accelerator: An ``accelerate.Accelerator`` of a single process, or of many with DDP or FSDP2.
        joinables: The model, optimizers and schedulers, as ``accelerator.prepare`` returned them.
        even_batches: The setting of prepared loaders of map-style data sets inside the block. ``True`` repeats samples
            until all ranks have the same number, ``False`` does not. ``None`` keeps the accelerator's setting, and
            warns if that is ``True``.
        **arguments: Arguments of :class:`join.Join` except ``loss_divided_by``. ``divide_by_initial_world_size`` is
            ``False`` by default.

    Raises:
        TypeError: If ``accelerator`` is not an ``Accelerator``.
        ValueError: If it cannot join: FSDP1, DeepSpeed, Megatron, or an option of :data:`REFUSED`.
        ImportError: If the version of Accelerate is too old.
        Exception: All errors of :class:`join.Join`.
    """
    check_accelerator(accelerator)
    objects = list(joinables)
    warn_if_alone("join_uneven_inputs", accelerator.num_processes, "Without GPUs, pass cpu=True to the Accelerator.")
    if accelerator.distributed_type.value == "NO":
        return AcceleratedJoin(accelerator, [], even_batches, enable=False, process_group=SingleCollective())
    if accelerator.scaler is not None and all(listed is not accelerator.scaler for listed in objects):
        objects.append(accelerator.scaler)
    options = {"divide_by_initial_world_size": False} | arguments
    with in_words_of(ADVICE):
        return AcceleratedJoin(accelerator, objects, even_batches, **options)


class AcceleratedJoin(Join):
    """A :class:`Join` that changes an accelerator while it is open.

    Args:
        accelerator: The accelerator that has prepared the listed objects.
        joinables: The objects to synchronise, as in ``Join``.
        even_batches: The setting of prepared loaders, as in :func:`join_uneven_inputs`.
        **arguments: Other arguments of ``Join``.
    """

    def __init__(self, accelerator: Any, joinables: list[Any], even_batches: bool | None, **arguments: Any) -> None:
        steps = accelerator.gradient_accumulation_steps
        super().__init__(joinables, loss_divided_by=steps, **arguments)
        if steps > 1:
            self.weight = 1.0
        self._accelerator, self._prepared = accelerator, PreparedLoaders(lambda: self._step, even_batches)
        self._restore = ExitStack()
        self._entered: dict[int, Step] = {}  # by the id of a model: the last step in which it has entered accumulate
        self._loader: Any = None  # the loader of the last loop over iterate

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._change(self._accelerator)
        except BaseException as error:
            self.close(error)
            raise
        return self

    def _change(self, accelerator: Any) -> None:
        undo = self._restore
        undo.enter_context(scaling_losses(accelerator, self.scale))
        undo.enter_context(replaced(accelerator, "_do_sync", partial(self._set_sync_gradients, accelerator._do_sync)))
        accumulate = partial(self._accumulate, accelerator.accumulate, accelerator.gradient_accumulation_steps)
        undo.enter_context(replaced(accelerator, "accumulate", accumulate))
        if self._block is not None:  # it is None with enable=False
            prepared, prepare = self._prepared, accelerator.prepare_data_loader
            for loader in accelerator._dataloaders:
                prepared.change(loader, undo)

            def prepare_in_block(loader: Any, *args: Any, **named: Any) -> Any:
                result = prepare(loader, *args, **named)
                if result is not loader:  # otherwise it was prepared before
                    prepared.change(result, undo)
                return result

            undo.enter_context(replaced(accelerator, "prepare_data_loader", prepare_in_block))
            undo.enter_context(counting_no_dummies(accelerator, self, prepared))
            undo.enter_context(replaced(accelerator, "save_state", partial(self._save_state, accelerator.save_state)))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._prepared.batch = None
        if error is not None:
            advise(error, ADVICE)
        with self._restore:
            super().__exit__(kind, error, traceback)
        if hasattr(self._loader, "dl_state_dict"):  # the loader had read ahead if a break ended the loop
            self._loader.dl_state_dict, self._loader = self.loader_state(), None

    def _save_state(self, as_usual: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Save the state; the state of the current loop's loader is that after the current batch."""
        if hasattr(self._loader, "dl_state_dict"):
            at_end = set(
                self.collective.all_gather_object(self.loader_state().get("_iterator_finished", False), plain=True)
            )
            is_wrong, state = len(at_end) > 1, replaced(self._loader, "state_dict", self.loader_state)
        else:
            loaders: list[Any] = self._accelerator.gradient_state.dataloader_references
            has_state = any(hasattr(loader, "dl_state_dict") for loader in loaders)
            has_read = self._loop is not None and (self._loop.is_open or bool(self.pending))
            is_wrong, state = has_state and any(self.collective.all_gather_object(has_read, plain=True)), nullcontext()
        if is_wrong:
            raise JoinError(
                "save_state saves one loader state for all ranks, which would be wrong: the loaders of only some ranks"
                " have reached their end, or the loader is wrapped. Save earlier, loop over the prepared loader itself,"
                " or save join.loader_state() of each rank. [J520]"
            )
        with state:
            return as_usual(*args, **named)

    def _set_sync_gradients(self, as_usual: Callable[[], None]) -> None:
        """Set on the accelerator whether gradients are reduced in the micro-batch that begins."""
        if not self._step.in_loop:
            as_usual()
        else:
            self._accelerator.sync_gradients = self.ends_window

    def _accumulate(self, as_usual: Callable[..., Any], steps: int, *models: Any) -> Any:
        """Enter ``accelerator.accumulate``, once for a model in a step of a loop.

        Accumulation windows count the steps of the loop, and Accelerate's own count the calls of ``accumulate``.
        """
        step = self._step
        for model in models if step.in_loop and steps > 1 else ():
            if self._entered.get(id(model)) is step:
                raise JoinError(
                    f"accelerator.accumulate was entered again for the same model in step {step.number} of"
                    f" join.iterate, but gradient_accumulation_steps={steps} counts the batches of the loop. Cut the"
                    " batches before the loop: pass join.iterate a generator that yields the micro-batches of each"
                    " batch. [J600]"
                )
            self._entered[id(model)] = step
        return as_usual(*models)

    @override
    def iterate(self, loader: Iterable[T], until: Literal["all", "first"] = "all", **options: Any) -> Batches[T]:
        """Loop as in :class:`Join`, in windows of ``gradient_accumulation_steps``; a dummy is the last batch."""
        mixes_ranks = self._block is not None and any(b.mixes_ranks for _, b in self.channel.roster.bursts)
        options.setdefault("window", self._accelerator.gradient_accumulation_steps)
        options.setdefault("dummy", "empty" if mixes_ranks else "last")
        options["resumable"] = hasattr(loader, "dl_state_dict") or options.get("resumable", False)
        self._loader = loader
        batches = super().iterate(loader, until, **options)
        batches.join_iterators[:] = map(self._prepared.seeing, batches.join_iterators)
        return batches


class PreparedLoaders:
    """Prepared loaders in a block: whether they are even, and whether one runs inside a step of the block's loop.

    Args:
        step: Returns the current step of the loop.
        even_batches: The setting of prepared loaders, as in :func:`join_uneven_inputs`.
    """

    def __init__(self, step: Callable[[], Step], even_batches: bool | None) -> None:
        self._step, self._even_batches = step, even_batches
        self.batch: Any = None
        """Batch of the current step of the block's loop; ``None`` if it is unknown."""
        self._nested: dict[Iterator[Any], Step] = {}  # by the iterator of a loader that began inside a step: the step
        self._last: Step | None = None  # the last step in which a loader began

    def seeing(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of the block's loop, each of which is ``batch`` during its step."""
        for batch in batches:
            self.batch = batch
            yield batch
        self.batch = None

    def evaluates(self) -> bool:
        """Return whether a prepared loader runs inside the current step, so that its batches are no dummies."""
        step = self._step()
        return any(each is step for each in self._nested.values())

    def has_evaluated(self) -> bool:
        """Return whether a prepared loader began inside the current step."""
        return self._last is self._step()

    def change(self, loader: Any, undo: ExitStack) -> None:
        """Change a loader for the duration of a block, or warn if it repeats samples."""
        module: Any = importlib.import_module("accelerate.data_loader")
        sampler, kind = loader.batch_sampler, cast("Any", type(loader))
        evaluating = nullcontext
        if isinstance(sampler, module.BatchSamplerShard):
            if self._even_batches is not None:
                undo.callback(setattr, sampler, "even_batches", sampler.even_batches)
                evaluating = partial(replaced, sampler, "even_batches", sampler.even_batches)
                sampler.even_batches = self._even_batches
            elif sampler.even_batches:
                _warn_of_repeats(
                    "A prepared loader repeats samples until all ranks have the same number. Pass even_batches=False"
                )
        if isinstance(loader, module.DataLoaderDispatcher) or isinstance(loader.dataset, module.IterableDatasetShard):
            _warn_of_repeats(
                "A prepared loader of a stream yields the same number of batches on all ranks, and may repeat samples"
                " for that. Do not pass it to accelerator.prepare, and let each rank read a stream of its own"
            )

        def batches(loader: Any) -> Generator[Any]:
            step, source = self._step(), iter(kind.__iter__(loader))
            if step.in_loop:
                self._nested[source] = self._last = step
            try:
                while True:
                    # Inside a step all ranks gather its rows, so it is even; but not the loop's own, read meanwhile.
                    with evaluating() if step.in_loop else nullcontext():
                        batch = next(source, loader)
                    if batch is loader:  # the default of next(), so the loader has no more batches
                        return
                    yield batch
            finally:
                self._nested.pop(source, None)

        changes: dict[str, Any] = {"__iter__": batches}
        if issubclass(kind, module.DataLoaderShard):  # Accelerate 1.11 and 1.12 subtract the batches of other ranks
            changes["adjust_state_dict_for_prefetch"] = staticmethod(lambda: None)
        undo.callback(with_methods(loader, changes))


_NO_LOADERS = PreparedLoaders(lambda: PLAIN, None)


def _warn_of_repeats(text: str) -> None:
    warnings.warn(f"join_uneven_inputs: {text}", stacklevel=5)


# -- steps of a block -------------------------------------------------------------------------------------------------


def scaling_losses(accelerator: Any, scale: Callable[[Any], Any]) -> AbstractContextManager[None]:
    """Return a context in which ``accelerator.backward`` scales each loss, as by the weight of its batch."""
    backward = accelerator.backward

    def scaled_backward(loss: Any, **named: Any) -> None:
        backward(scale(loss), **named)

    return replaced(accelerator, "backward", scaled_backward)


def watching_functions(check: Callable[[str], None]) -> AbstractContextManager[None]:
    """Return a context in which ``check`` gets the name of each function of Accelerate that gathers or reduces.

    A script has its own names for ``accelerate.utils.gather`` and the like, so they cannot be replaced. Each asks for
    ``PartialState`` before it communicates. ``pad_across_processes``, which gathers sizes, may count dummies.
    """
    operations: Any = importlib.import_module("accelerate.utils.operations")
    state = operations.PartialState

    def watched() -> Any:
        frame: Any = inspect.currentframe()
        frame = frame.f_back
        while (caller := frame.f_back.f_globals["__name__"]).startswith("accelerate."):
            frame = frame.f_back
        # In the wrapper of a decorator, the function is a local name.
        name = getattr(frame.f_locals.get("function", frame.f_code), "__name__", frame.f_code.co_name)
        if name in ("gather", "gather_object", "reduce") and not caller.startswith("joinables."):
            check(f"accelerat{'or' if 'self' in frame.f_locals else 'e.utils'}.{name}")
        return state()

    return replaced(operations, "PartialState", watched)


def refuse(name: str) -> None:
    """Raise the error of a function of Accelerate that would count dummies.

    Raises:
        JoinError: In any case.
    """
    raise JoinError(
        f"{name} would count dummies too. Call accelerator.gather_for_metrics, which does not, or"
        " accelerator.reduce for a loss. For a number that losses are divided by, call"
        " torch.distributed.all_reduce, and pass join_uneven_inputs(..., divide_by_initial_world_size=True) and"
        " join.iterate(loader, fill_window=True). [J521]"
    )


@contextmanager
def reducing_losses(accelerator: Any, join: Join) -> Generator[Callable[..., Any]]:
    """Return a context with a function that replaces ``accelerator.reduce``: it reduces losses of ranks with data.

    A dummy is the rank's last batch. So its values look like others, and so does a rank's own sum over many batches.
    A loss of the step is known by its value, which casts and copies keep: on each rank, the value equals a loss that
    ``accelerator.backward`` has received in the step. If all ranks have data, this may be true of a sum, too, which is
    then over a single batch; it has the same result. On a dummy, a sum equals an earlier loss and not the one of the
    step.

    Args:
        accelerator: The accelerator.
        join: The block with the current loop over ``iterate``.
    """
    as_usual, run_backward = accelerator.reduce, accelerator.backward
    losses: list[tuple[Step, torch.Tensor]] = []  # copies of those in the last step with a backward

    def backward(loss: Any, **named: Any) -> None:
        run_backward(loss, **named)
        step = join.channel.place.step
        losses[:] = [*(each for each in losses if each[0] is step), (step, loss.detach().clone())]

    def reduce(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if tensor is accelerator.flag_tensor:  # set_trigger passes it, on any rank
            return as_usual(tensor, reduction, scale)
        step, values = join.channel.place.step, tensors_in(tensor)
        own = [loss for each, loss in losses if each is step]
        are_losses = bool(values) and all(any(_equals(value, loss) for loss in own) for value in values)
        on_all_ranks = torch.tensor(int(are_losses), device="cpu")
        join.collective.all_reduce(on_all_ranks, "min").wait()
        if not on_all_ranks:
            raise JoinError(
                f"accelerator.reduce got a value that is not a loss of step {step.number}, as accelerator.backward"
                " received it. In a sum over several batches, ranks without data count, too, and in a value of the"
                " batch they do not. To divide a loss, reduce it first. For any other value of the batch, call"
                " accelerator.gather_for_metrics and reduce its rows. For a sum of your own, call"
                " torch.distributed.all_reduce. [J725]"
            )
        over = {"mean": torch.mean, "max": torch.amax}.get(reduction, torch.sum)
        ranks = gather_rows(join, map_tensors(lambda leaf: leaf[None], tensor))
        return map_tensors(lambda rows: over(rows, 0), ranks)

    with replaced(accelerator, "backward", backward):
        yield reduce


def _equals(value: torch.Tensor, loss: torch.Tensor) -> bool:
    """Return whether a value is a loss, rounded to the dtype of the value."""
    if not value.is_floating_point() or value.numel() != loss.numel():
        return False
    return torch.allclose(value.detach().flatten(), loss.flatten().to(value), rtol=0, atol=0, equal_nan=True)


@contextmanager
def counting_no_dummies(
    accelerator: Any,
    join: Join,
    loaders: PreparedLoaders = _NO_LOADERS,
    gather: Callable[[Any], Any] | None = None,
) -> Generator[None]:
    """Return a context in which an accelerator's collectives drop rows of dummies, and its loaders end with the loop.

    Args:
        accelerator: The accelerator.
        join: The block with the current loop over ``iterate``.
        loaders: The prepared loaders, with which ranks may evaluate inside a step.
        gather: The function that replaces ``accelerator.gather``, which otherwise raises.
    """
    state = cast("object", accelerator.gradient_state)

    def is_at_end(_: object) -> bool:
        in_step = join.channel.place.step_of_body.in_loop and not loaders.evaluates()
        return join.is_last_step if in_step else cast("Any", state).end_of_dataloader

    # All objects of Accelerate's class share their attributes, so this object of a subclass has the same ones.
    gradient_state = type("InLoop", (type(state),), {"end_of_dataloader": property(is_at_end)})()

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if loaders.has_evaluated():
            raise JoinError(
                "accelerator.gather_for_metrics was called after an evaluation in the same step. It would drop the rows"
                " of ranks that are out of training data. Call it in the loop over the loader of the evaluation. For"
                " rows of the training batch, call it before the evaluation. [J726]"
            )
        if not use_gather_object:
            return gather_rows(join, input_data, samples_in(loaders.batch))
        own: list[Any] = [] if join.shadowing else list(input_data)
        return list(chain.from_iterable(join.collective.all_gather_object(own)))

    def in_loop(name: str, call: Callable[..., Any], own: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if loaders.evaluates():
            return own(*args, **named)
        if not join.channel.place.step_of_body.in_loop:
            raise JoinError(
                f"Ranks without data call {name} only in the body of a loop over join.iterate. Use such a loop, or make"
                " the call after the block. [J116]"
            )
        return call(*args, **named)

    with ExitStack() as undo:
        undo.enter_context(replaced(accelerator, "gradient_state", gradient_state))
        undo.enter_context(watching_functions(lambda name: in_loop(name, refuse, bool, name)))
        reduce = undo.enter_context(reducing_losses(accelerator, join))
        calls = {"gather_for_metrics": gather_for_metrics, "reduce": reduce, "gather": gather}
        for name, call in calls.items():
            if call is not None:
                own = partial(in_loop, f"accelerator.{name}", call, getattr(accelerator, name))
                undo.enter_context(replaced(accelerator, name, own))
        yield


def gather_rows(join: Join, data: Any, samples: int = 0) -> Any:
    """Return the rows of ``data`` of all ranks with data in this step, in rank order.

    All ranks call this in the same step, and may have different numbers of rows. A plain gather would count the rows of
    dummies as samples.

    Args:
        join: The block with the current loop over ``iterate``.
        data: Tensors of shape ``[rows, ...]`` in lists, tuples and dicts. All but the number of rows is the same on all
            ranks. A tensor without dimensions is a row.
        samples: The number of samples in the batch of this rank; 0 if that is unknown.

    Returns:
        The same structure, with the rows of all ranks.

    Raises:
        JoinError: On all ranks, if each passes one number as a row, and the batches have more than one sample.
    """
    leaves, spec = pytree.tree_flatten(data)
    rows: list[torch.Tensor] = [leaf if leaf.dim() else leaf[None] for leaf in leaves]
    lone = [leaf.dim() > 0 and leaf.numel() == 1 for leaf in leaves]
    if join.shadowing:
        rows, samples = [tensor[:0] for tensor in rows], sys.maxsize
    ranks, *told = zip(*gather_trees(join.collective, (rows, lone, samples)), strict=True)
    if min(told[1]) > 1 and any(map(all, zip(*told[0], strict=True))):
        raise JoinError(
            "accelerator.gather_for_metrics got one number as a row on each rank in step"
            f" {join.channel.place.step.number}, but the batches have {min(told[1])} samples or more. A sum of your own"
            " would lack the rows of ranks without data. Add such sums by torch.distributed.all_reduce. To divide"
            " losses by a sum, let them be means and pass join.iterate(weigh=function). For a value of the batch, pass"
            " a tensor without dimensions. [J765]"
        )
    return pytree.tree_unflatten(
        [torch.cat(parts).to(leaf.device) for leaf, *parts in zip(leaves, *ranks, strict=True)], spec
    )


# -- checks -----------------------------------------------------------------------------------------------------------


def check_accelerator(accelerator: Any, caller: str = "join_uneven_inputs") -> None:
    """Check that an accelerator can train on uneven inputs.

    Args:
        accelerator: The object to check.
        caller: The name of the function or class that received it, for the error.

    Raises:
        TypeError: If it is not an ``Accelerator``.
        ValueError: If it trains in a way that cannot join.
        ImportError: If the version of Accelerate is too old.
    """
    if not isinstance(accelerator, framework("accelerate").Accelerator):
        raise TypeError(f"accelerator is of type {type(accelerator).__name__}. Pass an accelerate.Accelerator. [J117]")
    kind = accelerator.distributed_type.value
    if kind not in _KINDS:
        raise ValueError(
            f"{caller} cannot train with {kind}. Use DDP or FSDP2. For DeepSpeed, write the loop without Accelerate, as"
            " recipes/deepspeed_zero.py does. [J119]"
        )
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1 cannot join. Pass FullyShardedDataParallelPlugin(fsdp_version=2) to the Accelerator, or"
            " fsdp_config={'version': 2} to TrainingArguments. [J120]"
        )
    place = "GradientAccumulationPlugin, or from gradient_accumulation_kwargs"
    refuse_options(REFUSED, accelerator.gradient_state.plugin_kwargs, place)
