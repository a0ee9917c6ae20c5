"""Joinables of a ``DistributedDataParallel`` module: :func:`joinables_of_ddp`.

A DDP module has three bursts, in this order: ``BucketRebuild``, ``BufferSync`` and ``GradientSync``. A module without
buffers, or with ``broadcast_buffers=False``, has no ``BufferSync``. The last joinable, ``Unlisted``, sends nothing. The
bursts issue the same collectives as DDP, at the same points of a step, with two exceptions. Buffers come from the
lowest rank that was active in the forward that changed them last, instead of from rank 0. Buckets are rebuilt at the
end of the first backward instead of in the next forward, which a joined rank never reaches. One training step::

    active rank                                        joined rank
    -----------                                        -----------
    forward   header                                   header
              broadcast of buffers (if it has any)     broadcast of buffers
    backward  sum of n or S, if needed (see Scaling)   the same
              all-reduce of each bucket                all-reduce of each bucket (zeros)
              all-reduce of the used map, if asked     all-reduce of the used map
              until they are rebuilt: header, bucket   header, bucket rebuild
              rebuild (a static graph: after the second)

The header is sent in the forward and overlaps with its computation. In a plain block, in four cases, it is sent when
the backward begins instead, and buffers, if any, have a header of their own in the forward:

- The blocks of the process group have several DDP modules, whose forwards and backwards may run in different orders.
- With ``divide_by_initial_world_size=True``, gradients may contain the last result in the forward.
- With ``divide_by_initial_world_size=False``, the module has no buffers.
- The block has a ``timeout``.

In the first backward of a static graph, all ranks need data, or have run a step before the block: there the reducer
learns how often the gradient of each parameter arrives.

Forwards under ``no_sync`` and forwards without grad do not communicate. A forward that finds a pending header does not
communicate either: the backward was skipped, or two forwards run before one backward.

A loop over ``Join.iterate`` broadcasts buffers once more at the beginning of a step, if the lowest rank with data is
another than before (``BufferSync``).

*Scaling.* DDP divides by the world size. With ``divide_by_initial_world_size=False`` and n contributors, the reduced
gradients are multiplied by ``world_size / n`` at the end of the backward. This is the same for every comm hook, for
chains of modules and for accumulation, and is skipped while n is the world size. ``joinables.ddp.mean`` lists all means
and the source of n. With weights, losses are scaled (``join.scaling``), and the sum S of the weights replaces n.

No rank waits for n or S before the end of the backward, with three exceptions. If there is a comm hook, a rank waits
for S, since the hook receives parts of the weighted mean. A rank that changes between weights and none waits for the
header. Under the mean over all ranks, so does a rank with kept gradients.

*Joined ranks.* The reduced gradient is written into ``param.grad`` if another joinable of the block communicates, so
that sharded optimizers step on it. Otherwise it arrives at the end of the block. If a rank is out of data in the middle
of an accumulation under ``no_sync``, its accumulated gradients go into the first burst that it shadows. Its other
gradients do not.

*Kept gradients.* Without ``zero_grad``, new gradients are added to the last result (``joinables.ddp.window``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch.nn.parallel import DistributedDataParallel

from join import Joinable
from joinables._torch import reducer
from joinables.ddp.buffers import BucketRebuild, BufferSync
from joinables.ddp.reduction import GradientSync
from joinables.unlisted import Unlisted


def joinables_of_ddp(ddp: DistributedDataParallel) -> list[Joinable]:
    """Return the joinables of a DDP module, in the order of the list.

    Args:
        ddp: The module.

    Raises:
        ValueError: If the module has an argument or a comm hook that is not supported, if it contains another DDP
            module, whose collectives a joined rank would not issue, or if it contains SyncBatchNorm that the forward
            which DDP calls does not run, as in the trainer.
    """
    if unsupported := reducer.unsupported(ddp):
        #: For the Python reducer, set `torch._dynamo.config.optimize_ddp = True` before you wrap the module. Instead of
        #: `mixed_precision`, run the forward in `torch.autocast`.
        raise ValueError(
            f"DistributedDataParallel has {' and '.join(unsupported)}. A rank without data cannot take part in that, or"
            " its result is not a mean over ranks. Remove it, and step optimizers after the backward. To keep it, list"
            " nothing and end the loop when a rank is out of data: Join([], process_group=None), with"
            " join.iterate(loader, until='first'). [J536]"
        )
    reducer.check(ddp)
    for name, module in cast("Iterator[tuple[str, torch.nn.Module]]", ddp.module.named_modules()):
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                f"The module is wrapped in DistributedDataParallel twice{f' ({name!r})' if name else ''}. Wrap the"
                " plain module, once. [J291]"
            )
        if isinstance(module, torch.nn.SyncBatchNorm) and getattr(cast("object", ddp.module), "forward_is_over", False):
            raise ValueError(
                f"The module contains SyncBatchNorm ({name!r}), which communicates outside the forward of"
                " DistributedDataParallel and cannot be shadowed. Use BatchNorm, feed all ranks evenly, or write a loop"
                " over join.iterate. [J104]"
            )
    rebuild = BucketRebuild(ddp)
    buffers = BufferSync(ddp) if reducer.broadcasts_buffers(ddp) else None
    # GradientSync is the last burst, so that plain joinables after the module follow its backward.
    joinables = rebuild, buffers, GradientSync(ddp, buffers, rebuild), Unlisted(ddp)
    return [joinable for joinable in joinables if joinable is not None]
