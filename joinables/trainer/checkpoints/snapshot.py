"""Everything that a fit resumes from: :func:`take` and :func:`resume`.

A snapshot has the same form in checkpoint files, for a second ``fit`` of the same trainer, and on its way home from
spawned processes. It is a dict of plain data and tensors::

    epochs, global_step          counters
    module                       the module's state dict
    optimizers, schedulers       a list each, in the order of configure_optimizers; sharded state is put together
    scaler                       of 16-mixed precision, or None
    callbacks                    by state_key
    metrics                      the latest value of each
    ranks                        a list, by rank: batches read in the epoch under way, its metrics so far, random
                                 numbers

An epoch counts as completed when its validation is over and schedulers have stepped. A fit that resumes from a snapshot
taken before that skips all batches and validates again.

Taking one is collective, since each rank holds a part. Ranks without data take part through ``CollectiveCall``::

    all-gather of the ranks' parts; the lowest rank with data becomes the writer
    for each sharded optimizer: its shards go to the writer
"""

from __future__ import annotations

import copy
import io
import sys
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import torch

from join.collectives._torch_private import pytree
from joinables._torch.optimizers import mark_stepped
from joinables.trainer.loops.metrics import MetricStore
from joinables.trainer.loops.optimizers import check_groups, optimizer_state
from joinables.trainer.loops.run import FitRun

_NEEDED = {"epochs", "global_step", "optimizers", "schedulers", "scaler", "callbacks", "metrics", "ranks"}


def take(run: FitRun, active: bool) -> dict[str, Any] | None:
    """Return the snapshot on the rank that writes it, ``None`` elsewhere; called on all ranks.

    Numbers of numpy become Python's, since files are read without numpy's code.

    Args:
        run: the fit.
        active: whether this rank still has data; outside a block, all ranks are active.
    """
    parts = run.collective.all_gather_object({**run.position.state_dict(), "active": active})
    writer = next(rank for rank, each in enumerate(parts) if each["active"])
    optimizers = [optimizer_state(each, writer=writer, rank=run.rank) for each in run.optimizers]
    if run.rank != writer:
        return None
    state: dict[str, Any] = {
        **run.counters.state_dict(),
        "module": run.module.state_dict(),
        "optimizers": optimizers,
        "schedulers": [each.scheduler.state_dict() for each in run.schedulers],
        "scaler": None if run.scaler is None else run.scaler.state_dict(),
        "callbacks": {each.state_key: each.state_dict() for each in run.trainer.callbacks},
        "metrics": dict(run.trainer.metrics),
        "ranks": parts,
    }
    run.module.on_save_checkpoint(state)
    for callback in run.trainer.callbacks:
        callback.on_save_checkpoint(run.trainer, run.module, state)
    return _without_numpy(state)


def _without_numpy(value: Any) -> Any:
    """A copy of nested containers with Python's numbers in the place of numpy's."""
    if isinstance(value, dict):
        found = cast("dict[Any, Any]", value)
        made = copy.copy(found)  # of the same class, and with a state dict's metadata
        made.clear()
        made.update({_without_numpy(key): _without_numpy(each) for key, each in found.items()})
        return made
    if type(value) in (list, tuple, set):
        found = cast("list[Any]", value)
        return type(found)(map(_without_numpy, found))
    numpy = sys.modules.get("numpy")
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def check_readable(state: Mapping[str, Any]) -> None:
    """Refuse a state that holds more than plain data and tensors: it could be written, but not read again."""
    for key, value in state.items():
        file = io.BytesIO()
        torch.save(pytree.tree_map_only(torch.Tensor, lambda _: None, value), file)
        file.seek(0)
        unreadable = torch.serialization.get_unsafe_globals_in_checkpoint(file)
        if unreadable:
            raise TypeError(
                f"the checkpoint's {key!r} holds {' and '.join(sorted(unreadable))}, which could not be read again;"
                " give plain data and tensors [J200]"
            )


def check(state: Mapping[str, Any], path: str, needed: Set[str] = _NEEDED) -> None:
    """Refuse what was read from the file ``path`` if it lacks one of ``needed``; by default, what a fit needs."""
    missing = sorted(needed - state.keys())
    if missing:
        raise ValueError(
            f"ckpt_path={path!r} is no checkpoint of a Trainer: it has no {', '.join(missing)}. If it holds weights,"
            " load them with module.load_state_dict(torch.load(...)), and leave ckpt_path out [J201]"
        )


def resume(run: FitRun, state: Mapping[str, Any]) -> None:
    """Load a snapshot, the same on all ranks, into a fit that has its optimizers but has not begun.

    Raises:
        ValueError: if it was taken from other optimizers, groups of parameters or schedulers; or in the middle of an
            epoch by another number of ranks, and the rest of it cannot be dealt out.
    """
    for what, mine in (("optimizers", run.optimizers), ("schedulers", run.schedulers)):
        if len(state[what]) != len(mine):
            raise ValueError(
                f"the state to resume from has {len(state[what])} {what}, configure_optimizers {len(mine)}; return as"
                " many as when it was written [J202]"
            )
    part = _part_of(run, state["ranks"])
    run.module.on_load_checkpoint(dict(state))
    if "module" in state:
        run.module.load_state_dict(state["module"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        check_groups(optimizer, saved)
        optimizer.load_state_dict(saved)
        if state["global_step"]:  # or a scheduler that steps before it does warns, where no batch is left of the epoch
            mark_stepped(optimizer)
    for scheduler, saved in zip(run.schedulers, state["schedulers"], strict=True):
        scheduler.scheduler.load_state_dict(saved)
    if run.scaler is not None and state["scaler"] is not None:
        run.scaler.load_state_dict(state["scaler"])
    run.counters.load_state_dict(state)
    run.position.epoch = run.counters.epochs
    run.trainer.metrics = dict(state["metrics"])
    for callback in run.trainer.callbacks:
        if callback.state_key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][callback.state_key])
        callback.on_load_checkpoint(run.trainer, run.module, state)
    if part is not None:
        run.position.load_state_dict(part)


def _part_of(run: FitRun, parts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """What this rank goes on from; ``None`` if another number of ranks begins an epoch.

    If another number of ranks goes on in the middle of one, the samples that were used are the first of the epoch, and
    the others are dealt out anew. A rank takes over the random numbers of one rank of before, and the metrics of all
    whose number is its own, modulo the number of ranks.
    """
    rank, ranks, before = run.rank, run.collective.world_size, len(parts)
    if before == ranks:
        return parts[rank]
    if not any(part["batches"] or part["start"] for part in parts):
        return None  # no batch of the epoch was used
    batches, used = [part["batches"] for part in parts], parts[0]["used"]
    dealt_out = [len(range(each, sum(batches), before)) for each in range(before)]
    if run.position.sampler is None or used is None or batches != dealt_out:
        raise ValueError(
            f"the checkpoint was written in the middle of an epoch by {before} ranks, and there are {ranks}. What is"
            " left of it can be dealt out anew if the trainer deals out the samples: give it a DataLoader without a"
            " sampler; or resume with as many ranks, or from a checkpoint of an epoch's end [J203]"
        )
    metrics = MetricStore()
    for part in parts[rank::ranks]:
        metrics.merge(part["metrics"])
    return {**parts[rank % before], "batches": 0, "start": used, "metrics": metrics.state_dict()}
