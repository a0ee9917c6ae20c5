"""Uneven inputs with Accelerate: :func:`join_uneven_inputs`, in the place of ``accelerator.join_uneven_inputs``.

::

    with join_uneven_inputs(accelerator, [model, optimizer, scheduler], even_batches=False) as join:
        for x, y in join.iterate(loader):       # or, with DDP, loader
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

Theirs works with DDP on GPUs, and not with an optimizer that shards, with accumulation, or with FSDP. This one is a
:class:`join.Join` of the prepared objects, as they are, on any backend.

In the block, ``accelerator.backward`` scales each loss by the weight of its batch. It also divides each by
``gradient_accumulation_steps``, also in windows that are not full, so the block is told that by ``loss_divided_by``.

A loop over ``join.iterate`` reads ahead, so Accelerate's own loader says too early that it has come to its end; and on
each rank at another step. In such a loop ``accelerator.accumulate`` asks the block, whose windows of accumulation end
at the same step on all ranks, and so does whoever asks for ``end_of_dataloader`` or saves the state of a loader. In a
plain loop each rank's window ends with its own loader, and the last reductions have fewer micro-batches.

A dummy is the rank's last batch itself, of weight 0: the body of a script for a framework seldom expects empty ones. So
what a rank with a dummy gives to ``gather_for_metrics`` and ``reduce`` is left out.

Tried on Accelerate 1.15.0.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Literal, TypeVar, cast

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, override

from join import Join, JoinError
from join.batch import map_tensors
from join.collectives import SingleCollective
from join.collectives._torch_private import pytree
from join.loop import Batches
from join.transfer import gather_trees
from joinables.modules import replaced
from joinables.wrapped import unwrapped

__all__ = ["AcceleratedJoin", "check_accelerator", "check_wrapping", "gather_rows", "join_uneven_inputs"]

T = TypeVar("T")

OLDEST = (1, 15)
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "FSDP")


def join_uneven_inputs(
    accelerator: Any, joinables: Iterable[Any], even_batches: bool | None = None, **arguments: Any
) -> Join:
    """A block in which ranks may have different numbers of batches, of what ``accelerator`` has prepared.

    Gradients are the mean over the micro-batches of all ranks, which weigh 1, or what ``join.iterate(weigh=...)`` or,
    in a plain loop, ``join.weight`` says: call ``accelerator.backward`` for each loss. In one process that is so in a
    loop over ``join.iterate``; in a plain one, the loss is what Accelerate makes of it.

    A loop over ``join.iterate`` has windows of ``gradient_accumulation_steps``, for ``accelerator.accumulate``; give
    another ``window`` if it is for something else.

    Under ``accelerator.accumulate`` in a plain loop, the window that is not full at the end of a rank's loader makes a
    step only if that loader is a prepared one, which tells Accelerate that it is at its end, and the model is not
    sharded; in a loop over ``join.iterate`` any loader and model will do. To prepare a stream of this rank's own:
    ``accelerate.data_loader.prepare_data_loader(loader, num_processes=1, process_index=0)``.

    In a loop over ``join.iterate``, ``accelerator.gather_for_metrics`` returns the rows of all ranks that have data,
    also where their numbers differ; ``accelerator.reduce`` is over these ranks; ``accelerator.gather`` raises, since it
    would have rows of dummies. In a plain loop, where ranks without data never come to them, they raise. The dummies
    are ``dummy="last"`` by default, but ``"empty"`` where the model has SyncBatchNorm.

    Args:
        accelerator: an ``accelerate.Accelerator``: of one process, or of many with DDP or FSDP2.
        joinables: the model, optimizers and schedulers, as ``accelerator.prepare`` has returned them.
        even_batches: what prepared loaders of map-style data sets do inside the block: ``True`` repeats samples until
            all ranks have as many, ``False`` does not. ``None``: what the accelerator was given; that ``True`` warns.
        **arguments: those of :class:`join.Join` but ``loss_divided_by``. ``divide_by_initial_world_size`` is ``False``
            if it is not given.

    Raises:
        TypeError: if ``accelerator`` is none.
        ValueError: for what cannot join: FSDP1, DeepSpeed, Megatron, ``sync_each_batch``, a model wrapped twice.
        ImportError: for a version of Accelerate that is too old.
        others: as :class:`join.Join`.
    """
    check_accelerator(accelerator)
    objects = list(joinables)
    for listed in objects:
        check_wrapping(unwrapped(listed))
    if accelerator.distributed_type.value == "NO":
        return AcceleratedJoin(accelerator, [], even_batches, enable=False, process_group=SingleCollective())
    if accelerator.scaler is not None and all(listed is not accelerator.scaler for listed in objects):
        objects.append(accelerator.scaler)
    return AcceleratedJoin(accelerator, objects, even_batches, **{"divide_by_initial_world_size": False} | arguments)


class AcceleratedJoin(Join):
    """A :class:`Join` that Accelerate knows of while it is open.

    Args:
        accelerator: the one that has prepared what is listed.
        joinables: as for ``Join``.
        even_batches: as for :func:`join_uneven_inputs`.
        **arguments: as for ``Join``.
    """

    def __init__(self, accelerator: Any, joinables: list[Any], even_batches: bool | None, **arguments: Any) -> None:
        steps = accelerator.gradient_accumulation_steps
        super().__init__(joinables, loss_divided_by=steps, **arguments)
        if steps > 1:
            self.weight = 1.0
        self._accelerator, self._even_batches = accelerator, even_batches
        self._restore = ExitStack()
        self._loader: Any = None  # of the last loop over iterate

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
        undo.enter_context(scaling_losses(accelerator, self))
        undo.enter_context(replaced(accelerator, "_do_sync", partial(self._set_sync_gradients, accelerator._do_sync)))
        if self._block is not None:  # else enable=False
            for loader in accelerator._dataloaders:
                self._set_evenness(loader)
            undo.enter_context(counting_no_dummies(accelerator, self))
            undo.enter_context(replaced(accelerator, "save_state", partial(self._save_state, accelerator.save_state)))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._restore:
            super().__exit__(kind, error, traceback)
        if hasattr(self._loader, "dl_state_dict"):  # it was ahead where the loop was left by a break
            self._loader.dl_state_dict, self._loader = self.loader_state(), None

    def _set_evenness(self, loader: Any) -> None:
        module: Any = importlib.import_module("accelerate.data_loader")
        sampler = loader.batch_sampler
        if isinstance(sampler, module.BatchSamplerShard):
            if self._even_batches is not None:
                self._restore.callback(setattr, sampler, "even_batches", sampler.even_batches)
                sampler.even_batches = self._even_batches
            elif sampler.even_batches:
                _warn_of_repeats(
                    "a prepared loader repeats samples until all ranks have as many; give even_batches=False"
                )
        if isinstance(loader, module.DataLoaderDispatcher) or isinstance(loader.dataset, module.IterableDatasetShard):
            _warn_of_repeats(
                "a prepared loader of a stream gives all ranks as many batches, and may repeat samples for that; leave"
                " it out of accelerator.prepare, and let each rank read a stream of its own"
            )

    def _save_state(self, as_usual: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Save the state, with that of the loader of the loop under way as of the batch in hand."""
        if hasattr(self._loader, "dl_state_dict"):
            ends = set(self.collective.all_gather_object(self.loader_state().get("_iterator_finished", False)))
            is_wrong, state = len(ends) > 1, replaced(self._loader, "state_dict", self.loader_state)
        else:
            read: list[Any] = self._accelerator.gradient_state.dataloader_references
            state, is_wrong = nullcontext(), bool(self._step) and any(hasattr(each, "dl_state_dict") for each in read)
        if is_wrong:
            raise JoinError(
                "save_state has one place for all ranks, and some are at their end, or the loader is wrapped; save"
                " earlier, loop over the prepared loader itself, or save join.loader_state() of each rank [J520]"
            )
        with state:
            return as_usual(*args, **named)

    def _set_sync_gradients(self, as_usual: Callable[[], None]) -> None:
        """Tell Accelerate whether gradients are reduced in the micro-batch that begins."""
        if self._step is None:
            as_usual()
        else:
            self._accelerator.sync_gradients = self.ends_window

    @override
    def iterate(self, loader: Iterable[T], until: Literal["all", "first"] = "all", **options: Any) -> Batches[T]:
        """As of :class:`Join`; a window has Accelerate's ``gradient_accumulation_steps``, dummies are last batches."""
        mixes_ranks = self._block is not None and any(b.mixes_ranks for _, b in self.channel.roster.bursts)
        options.setdefault("window", self._accelerator.gradient_accumulation_steps)
        options.setdefault("dummy", "empty" if mixes_ranks else "last")
        self._loader = loader
        return super().iterate(loader, until, **options)


def _warn_of_repeats(text: str) -> None:
    warnings.warn(f"join_uneven_inputs: {text}", stacklevel=5)


# -- steps of a block -------------------------------------------------------------------------------------------------


def scaling_losses(accelerator: Any, join: Join) -> AbstractContextManager[None]:
    """A context in which ``accelerator.backward`` scales each loss by the weight of its batch in the block ``join``."""
    backward = accelerator.backward

    def scaled_backward(loss: Any, **named: Any) -> None:
        backward(join.scale(loss), **named)

    return replaced(accelerator, "backward", scaled_backward)


@contextmanager
def counting_no_dummies(accelerator: Any, join: Join) -> Generator[None]:
    """A context in which an accelerator's collectives leave out what dummies give, and its loaders end with the loop.

    Args:
        accelerator: the object that is asked.
        join: the block whose loop over ``iterate`` is under way.
    """
    as_usual, state = accelerator.reduce, cast("object", accelerator.gradient_state)

    def is_at_end(_: object) -> bool:
        return join.is_last_step if join.channel.is_in_loop_body else cast("Any", state).end_of_dataloader

    # One of Accelerate's, all of which have the same attributes.
    gradient_state = type("InLoop", (type(state),), {"end_of_dataloader": property(is_at_end)})()

    def gather(tensor: Any) -> Any:
        raise JoinError(
            "accelerator.gather has rows of dummies, too; call accelerator.gather_for_metrics, which has not [J521]"
        )

    def gather_for_metrics(input_data: Any, use_gather_object: bool = False) -> Any:
        if not use_gather_object:
            return gather_rows(join, input_data)
        own: list[Any] = [] if join.shadowing else list(input_data)
        return list(chain.from_iterable(join.collective.all_gather_object(own)))

    def reduce(tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if tensor is accelerator.flag_tensor:  # of set_trigger, on any rank
            return as_usual(tensor, reduction, scale)
        over = {"mean": torch.mean, "max": torch.amax}.get(reduction, torch.sum)
        ranks = gather_rows(join, map_tensors(lambda each: each[None], tensor))
        return map_tensors(lambda rows: over(rows, 0), ranks)

    def in_loop(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if not join.channel.is_in_loop_body:
            raise JoinError(
                f"ranks without data never come to accelerator.{call.__name__} outside of a loop over join.iterate; use"
                " one, or call it after the block [J116]"
            )
        return call(*args, **named)

    with ExitStack() as undo:
        undo.enter_context(replaced(accelerator, "gradient_state", gradient_state))
        for call in (gather, gather_for_metrics, reduce):
            undo.enter_context(replaced(accelerator, call.__name__, partial(in_loop, call)))
        yield


def gather_rows(join: Join, data: Any) -> Any:
    """The rows of ``data`` of all ranks with data in this step, in rank order; ranks may have different numbers.

    All ranks call it in the same step. Without it, what a dummy gives would count as a sample.

    Args:
        join: the block whose loop over ``iterate`` is under way.
        data: tensors in lists, tuples and dicts, ``[rows, ...]`` each, all but the rows alike on all ranks; a tensor
            without dimensions is a row.

    Returns:
        The same, with the rows of all ranks.
    """
    leaves, spec = pytree.tree_flatten(data)
    rows: list[torch.Tensor] = [leaf if leaf.dim() else leaf[None] for leaf in leaves]
    if join.shadowing:
        rows = [tensor[:0] for tensor in rows]
    ranks = gather_trees(join.collective, rows)
    return pytree.tree_unflatten(
        [torch.cat(parts).to(leaf.device) for leaf, *parts in zip(leaves, *ranks, strict=True)], spec
    )


# -- checks -----------------------------------------------------------------------------------------------------------


def check_accelerator(accelerator: Any, caller: str = "join_uneven_inputs") -> None:
    """Refuse what is no accelerator, or one that cannot train on uneven inputs.

    Args:
        accelerator: what was given.
        caller: the name of what it was given to, for the error.

    Raises:
        TypeError, ValueError, ImportError: as :func:`join_uneven_inputs`.
    """
    library: Any = sys.modules.get("accelerate")
    if library is None or not isinstance(accelerator, library.Accelerator):
        raise TypeError(
            f"accelerator is a {type(accelerator).__name__}; give an accelerate.Accelerator (pip install"
            " 'joinables[accelerate]') [J117]"
        )
    version = tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2])
    if version < OLDEST:
        raise ImportError(f"{caller} needs Accelerate 1.15 or newer, not {library.__version__}; upgrade it [J118]")
    kind = accelerator.distributed_type.value
    if kind not in _KINDS:
        raise ValueError(f"{caller} cannot train with {kind}; use DDP or FSDP2 [J119]")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1 cannot join; give FullyShardedDataParallelPlugin(fsdp_version=2), or fsdp_config={'version': 2} to a"
            " Trainer [J120]"
        )
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise ValueError(
            "sync_each_batch=True reduces each micro-batch by itself, where no mean over the window can be made; leave"
            " it out of GradientAccumulationPlugin, or of gradient_accumulation_kwargs [J121]"
        )


def check_wrapping(module: Any, way_out: str = "give accelerator.prepare the plain one") -> None:
    """Raise a ``ValueError`` for a module that is wrapped twice.

    Args:
        module: what is trained.
        way_out: what to do, for the error.
    """
    if isinstance(module, DistributedDataParallel) and isinstance(module.module, DistributedDataParallel):
        #: Give what wraps the model the plain one.
        raise ValueError(f"the model is wrapped in DistributedDataParallel twice; {way_out} [J122]")
