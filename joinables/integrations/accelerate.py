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
at the same step on all ranks. In a plain loop each rank's window ends with its own loader, and the last reductions have
fewer micro-batches.

Tried on Accelerate 1.15.0.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, override

from join import Join, JoinError
from join.collectives import SingleCollective
from join.collectives._torch_private import pytree
from join.lockstep.loop import Batches
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
    also where their numbers differ. In a plain one, where ranks without data never come to it, it raises.

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
            undo.enter_context(gathering_rows(accelerator, self, self._has_no_rows))

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._restore:
            super().__exit__(kind, error, traceback)

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

    def _has_no_rows(self) -> bool:
        """Whether ``gather_for_metrics`` has no rows of this rank in this step.

        Raises:
            JoinError: outside a loop over ``iterate``.
        """
        if self._step is None:
            raise JoinError(
                "ranks without data never come to gather_for_metrics in a plain loop, nor before or after it in the"
                " block; loop over join.iterate(loader), or gather after the block [J116]"
            )
        return self.shadowing

    def _set_sync_gradients(self, as_usual: Callable[[], None]) -> None:
        """Tell Accelerate whether gradients are reduced in the micro-batch that begins."""
        if self._step is None:
            as_usual()
        else:
            self._accelerator.sync_gradients = self.ends_window

    @override
    def iterate(self, loader: Iterable[T], until: Literal["all", "first"] = "all", **options: Any) -> Batches[T]:
        """As of :class:`Join`; without ``window``, one has Accelerate's ``gradient_accumulation_steps``."""
        options.setdefault("window", self._accelerator.gradient_accumulation_steps)
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


def gathering_rows(accelerator: Any, join: Join, has_none: Callable[[], bool]) -> AbstractContextManager[None]:
    """A context in which ``accelerator.gather_for_metrics`` is :func:`gather_rows`, or the same of a list of objects.

    Args:
        accelerator: the object that is asked to gather.
        join: the block whose loop over ``iterate`` is under way.
        has_none: whether this rank has no rows.
    """

    def gather(input_data: Any, use_gather_object: bool = False) -> Any:
        none = has_none()
        if not use_gather_object:
            return gather_rows(join, input_data, none=none)
        return list(chain.from_iterable(join.collective.all_gather_object([] if none else list(input_data))))

    return replaced(accelerator, "gather_for_metrics", gather)


def gather_rows(join: Join, data: Any, *, none: bool | None = None) -> Any:
    """The rows of ``data`` of all ranks with data in this step, in rank order; ranks may have different numbers.

    All ranks call it in the same step. Without it, what a dummy gives would count as a sample.

    Args:
        join: the block whose loop over ``iterate`` is under way.
        data: tensors in lists, tuples and dicts, ``[rows, ...]`` each, all but the rows alike on all ranks; a tensor
            without dimensions is a row.
        none: whether this rank has no rows; by default, whether it has a dummy in this step.

    Returns:
        The same, with the rows of all ranks.
    """
    leaves, spec = pytree.tree_flatten(data)
    rows: list[torch.Tensor] = [leaf if leaf.dim() else leaf[None] for leaf in leaves]
    if join.shadowing if none is None else none:
        rows = [tensor[:0] for tensor in rows]
    ranks = gather_trees(join.collective, rows)
    return pytree.tree_unflatten(
        [torch.cat(parts).to(leaf.device) for leaf, *parts in zip(leaves, *ranks, strict=True)], spec
    )


# -- checks -----------------------------------------------------------------------------------------------------------


def check_accelerator(accelerator: Any) -> None:
    """Refuse what is no accelerator, or one that cannot train on uneven inputs.

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
        raise ImportError(
            f"join_uneven_inputs needs Accelerate 1.15 or newer, not {library.__version__}; upgrade it [J118]"
        )
    kind = accelerator.distributed_type.value
    if kind not in _KINDS:
        raise ValueError(f"join_uneven_inputs cannot train with {kind}; use DDP or FSDP2 [J119]")
    if kind == "FSDP" and not accelerator.is_fsdp2:
        raise ValueError("FSDP1 cannot join; give FullyShardedDataParallelPlugin(fsdp_version=2) [J120]")
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        raise ValueError(
            "sync_each_batch=True reduces each micro-batch by itself, where no mean over the window can be made; leave"
            " it out [J121]"
        )


def check_wrapping(module: Any) -> None:
    """Raise a ``ValueError`` for a module that is wrapped twice."""
    if isinstance(module, DistributedDataParallel) and isinstance(module.module, DistributedDataParallel):
        raise ValueError(
            "the model is wrapped in DistributedDataParallel twice; give accelerator.prepare the plain one [J122]"
        )
