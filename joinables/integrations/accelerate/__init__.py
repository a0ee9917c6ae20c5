"""Uneven inputs with Accelerate: :func:`join_uneven_inputs`, in the place of ``accelerator.join_uneven_inputs``.

::

    with join_uneven_inputs(accelerator, [model, optimizer, scheduler], even_batches=False) as join:
        for x, y in join.iterate(loader):       # or, with DDP, loader
            with accelerator.accumulate(model):
                accelerator.backward(loss_fn(model(x), y))
                optimizer.step(); scheduler.step(); optimizer.zero_grad()

Theirs works with DDP on GPUs, and not with an optimizer that shards, with accumulation, or with FSDP. This one is a
:class:`join.Join` of what was prepared, as it is, on any backend.

Tried on Accelerate 1.15.0.
"""

from __future__ import annotations

from joinables.integrations.accelerate.block import (
    AcceleratedJoin,
    check_accelerator,
    check_wrapping,
    join_uneven_inputs,
)
from joinables.integrations.accelerate.gather import gather_rows

__all__ = ["AcceleratedJoin", "check_accelerator", "check_wrapping", "gather_rows", "join_uneven_inputs"]
