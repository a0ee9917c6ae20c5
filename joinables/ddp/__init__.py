"""What a ``DistributedDataParallel`` module stands for: :func:`joinables_of_ddp`.

A stock DDP module stands for three bursts, ``BufferSync``, ``GradientSync`` and ``BucketRebuild``. Each issues the
collectives that DDP issues, at the place where DDP issues them, but for two: buffers come from the lowest active rank
and not from rank 0, and buckets are rebuilt at the end of the first backward and not in the forward after it, where a
joined rank never comes. One training step::

    active rank                                        joined rank
    -----------                                        -----------
    forward   header                                   header
              broadcast of buffers (if it has any)     broadcast of buffers
    backward  number of contributors (see Scaling)     number of contributors
              the first of a static graph: how often   how often
              gradients arrive (max)                   gradients arrive (max)
              all-reduce of each bucket                all-reduce of each bucket (the reducer's own backward, empty)
              all-reduce of the used map, if asked     all-reduce of the used map
              until they are rebuilt: header, bucket   header, bucket rebuild
              rebuild (a static graph: after the second)

The header is sent in the forward and hides behind it. Not so with several DDP modules in the blocks of a group, where
forward order is not backward order, when gradients are still there in the forward under the mean over all ranks, and
where the number of contributors is wanted and there are no buffers; nor under ``timeout``. Then the header is sent when
the backward begins, and buffers, if any, have one of their own in the forward.

``no_sync`` forwards and forwards without grad communicate nothing. A forward that finds a header open (the backward was
skipped, or two forwards go before one backward) communicates nothing either.

*Scaling.* DDP divides by the world size. With ``divide_by_initial_world_size=False`` and n contributors, the reduced
gradients are multiplied by ``world_size / n`` at the end of the backward: for every comm hook, chain and accumulation
alike, and not at all while n is the world size. The header counts the contributors if it is sent when the backward
begins. A header sent in the forward cannot know whether a backward will come, so then a number of its own is summed
next to the buckets. With weights, losses are scaled (``join.scaling``), and the sum of the weights is there instead of
that number. Neither is awaited before the end of the backward, but for the sum of weights where there is a comm hook
(``joinables.ddp.reduction``), and for the header where gradients are kept. In a loop over ``Join.iterate`` all
ranks know who had data, and what it weighs.

*Joined ranks.* The reduced gradient is written into ``param.grad`` so that sharded optimizers step on it. What a rank
had accumulated under ``no_sync`` when it ran out goes into the first burst it shadows; other gradients do not.

*Kept gradients.* DDP reduces what is in ``grad``, and without ``zero_grad`` that has the last result. Contributors give
it as often as makes the mean have it once (``joinables.ddp.reduction``); under the mean over all ranks that is
``world_size / n`` times, so there the backward begins by waiting for its header, which was sent just then. If headers
travel in messages, and no joined rank needs the gradients, the last result is set aside instead, and added to the new
one.
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


def joinables_of_ddp(ddp: DistributedDataParallel) -> list[Joinable]:
    """The bursts a DDP module stands for, in their order.

    Raises:
        ValueError: if it contains SyncBatchNorm and its own forward does not run it (the trainer's does not), or
            another DDP module, whose collectives a joined rank would leave out.
    """
    reducer.check(ddp)
    modules = cast("Iterator[tuple[str, torch.nn.Module]]", ddp.module.named_modules())
    for name, module in modules:
        if isinstance(module, DistributedDataParallel):
            raise ValueError(
                "the module is wrapped in DistributedDataParallel twice"
                f"{f' ({name!r})' if name else ''}; wrap the plain one, once [J291]"
            )
        is_over = getattr(cast("object", ddp.module), "forward_is_over", False)
        if isinstance(module, torch.nn.SyncBatchNorm) and is_over:
            raise ValueError(
                f"the module contains SyncBatchNorm ({name!r}), whose forward communicates outside DDP's and cannot"
                " be shadowed; use BatchNorm, or feed all ranks evenly [J104]"
            )
    rebuild = BucketRebuild(ddp)
    if not reducer.broadcasts_buffers(ddp):
        return [rebuild, GradientSync(ddp, None, rebuild)]
    buffers = BufferSync(ddp)
    return [rebuild, buffers, GradientSync(ddp, buffers, rebuild)]  # what follows the module follows its backward
