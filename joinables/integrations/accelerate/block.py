"""A block of what an ``Accelerator`` has prepared: :func:`join_uneven_inputs`, and its :class:`AcceleratedJoin`.

A loop over ``join.iterate`` reads ahead, so Accelerate's own loader says too early that it has come to its end; and on
each rank at another step. In such a loop Accelerate is shown another loader, :class:`LoopAsLoader`, which is at its end
in the last step of all ranks: there ``accelerator.accumulate`` ends the window on all of them. In a plain loop each
rank's window ends with its own loader, and the last reductions have fewer micro-batches.

``accelerator.backward`` divides each loss by ``gradient_accumulation_steps``, also in windows that are not full, so the
block is told that by ``loss_divided_by``.
"""

from __future__ import annotations

import importlib
import re
import sys
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, TypeVar

from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Self, override

from join import Join, JoinError
from join.collectives import SingleCollective
from joinables.integrations.accelerate.gather import gathering_rows
from joinables.wrapped import unwrapped

T = TypeVar("T")

OLDEST = (1, 15)
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "FSDP")


def join_uneven_inputs(
    accelerator: Any, joinables: Iterable[Any], even_batches: bool | None = None, **arguments: Any
) -> Join:
    """A block in which ranks may have different numbers of batches, of what ``accelerator`` has prepared.

    Gradients are the mean over the micro-batches of all ranks, which weigh 1, or ``join.weight`` where that is set: the
    loss is divided by Accelerate's ``gradient_accumulation_steps``, and the block knows it. In one process, which is
    told nothing, the loss is what Accelerate makes of it, and ``join.weight`` has no effect.

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
        **arguments: those of :class:`join.Join`. ``divide_by_initial_world_size`` is ``False`` if it is not given.

    Raises:
        TypeError: if ``accelerator`` is none.
        ValueError: for what cannot join: FSDP1, DeepSpeed, Megatron, ``sync_each_batch``, a model wrapped twice.
        ImportError: for a version of Accelerate that is too old.
        others: as :class:`join.Join`.
    """
    check_accelerator(accelerator)
    objects = list(joinables)
    for each in objects:
        check_wrapping(unwrapped(each))
    if accelerator.distributed_type.value == "NO":
        return AcceleratedJoin(accelerator, [], even_batches, enable=False, process_group=SingleCollective())
    if accelerator.scaler is not None and all(each is not accelerator.scaler for each in objects):
        objects.append(accelerator.scaler)
    if any(isinstance(unwrapped(each), DistributedDataParallel | FSDPModule) for each in objects):
        arguments.setdefault("divide_by_initial_world_size", False)
    arguments.setdefault("loss_divided_by", accelerator.gradient_accumulation_steps)
    return AcceleratedJoin(accelerator, objects, even_batches, **arguments)


class AcceleratedJoin(Join):
    """A :class:`Join` that Accelerate knows of while it is open.

    Args:
        accelerator: the one that has prepared what is listed.
        joinables: as for ``Join``.
        even_batches: as for :func:`join_uneven_inputs`.
        **arguments: as for ``Join``.
    """

    def __init__(self, accelerator: Any, joinables: list[Any], even_batches: bool | None, **arguments: Any) -> None:
        super().__init__(joinables, **arguments)
        self._accelerator, self._even_batches = accelerator, even_batches
        self._restore = ExitStack()

    @property
    @override
    def weight(self) -> float | None:
        """As of :class:`Join`; in one process, for which nothing is listed, it has no effect."""
        return super().weight

    @weight.setter
    def weight(self, weight: float | None) -> None:
        if not self._objects and self._accelerator.gradient_accumulation_steps > 1 and weight is not None:
            warnings.warn(
                "in one process join.weight does not weigh the micro-batches of a window: multiply the loss by what"
                " each counts",
                stacklevel=2,
            )
        Join.weight.__set__(self, weight)

    @override
    def __enter__(self) -> Self:
        super().__enter__()
        if self._block is None:  # enable=False
            return self
        for loader in self._accelerator._dataloaders:
            self._set_evenness(loader)
        self._restore.enter_context(gathering_rows(self._accelerator, self, self._has_no_rows))
        return self

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
        if self._loops.running is None:
            raise JoinError(
                "ranks without data never come to gather_for_metrics in a plain loop, nor before or after it in the"
                " block; loop over join.iterate(loader), or gather after the block [J116]"
            )
        return self.shadowing

    @override
    def iterate(
        self,
        loader: Iterable[T],
        until: Literal["all", "first"] = "all",
        *,
        dummy: Literal["empty", "last"] | Callable[[T], T] = "empty",
        lookahead: int = 1,
    ) -> Iterator[T]:
        batches = super().iterate(loader, until, dummy=dummy, lookahead=lookahead)
        return self._shown_to_accelerate(batches)

    def _shown_to_accelerate(self, batches: Iterator[T]) -> Generator[T]:
        loader, state = LoopAsLoader(self, self._accelerator), self._accelerator.gradient_state
        try:
            for batch in batches:
                if state.active_dataloader is not loader:  # the one that is read has begun or ended
                    state._remove_dataloader(loader)
                    state._add_dataloader(loader)
                yield batch
        finally:
            state._remove_dataloader(loader)


class LoopAsLoader:
    """What Accelerate takes for the loader under way in a loop over ``join.iterate``.

    Args:
        join: the block.
        accelerator: whose steps are counted.
    """

    remainder = -1
    """How many samples of the last batch are not repeated; nothing is."""

    def __init__(self, join: Join, accelerator: Any) -> None:
        self._join, self._accelerator = join, accelerator

    @property
    def end_of_dataloader(self) -> bool:
        """Whether a window of accumulation that is not full ends here, in the last step of all ranks."""
        accelerator = self._accelerator
        # A full one ends anyway, and to ask may mean to wait for the others.
        fills = (accelerator.step + 1) % accelerator.gradient_accumulation_steps == 0
        return not fills and self._join.is_last_step


def _warn_of_repeats(text: str) -> None:
    warnings.warn(f"join_uneven_inputs: {text}", stacklevel=5)


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
