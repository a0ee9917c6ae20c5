"""Modules with collectives of their own: :class:`Replay`, and what it stands for.

Some modules communicate in their forward and backward, in places that nobody else knows: ``fully_shard``,
SyncBatchNorm, tensor parallelism. A joined rank then *replays* them: it runs the module itself, on an empty batch, and
backward through it with zero gradients. So it issues the same collectives, by the same code, and says nothing in them::

    active rank                                        joined rank
    -----------                                        -----------
    forward   header                                   header
              the first: the call, an attempt (1)      the call, an attempt
              broadcast of buffers (DDP)               broadcast of buffers
              the module's own                         the module's own, on the empty batch
    backward  header                                   header
              sum of the weights, if any are set       sum of the weights
              which forwards, if several (2)           which forwards
              the module's own                         the module's own, with zero gradients

(1) again when the module is called in another way. (2) Forwards are numbered backwards from the last. A backward goes
through the forward that a gradient enters first, and those before it that are alive and had no backward yet.

Both headers are awaited where they are sent, so ranks that diverge get an error and not a hang. Forwards without grad
are replayed without it, evaluation in evaluation, backwards that reduce nothing without reducing.

*Gradients.* FSDP and DDP divide by the size of the group. The mean over contributors, or the weighted one, is a factor
on the result. A joined rank clears its gradients where the active ones have, and keeps them where they have. What it
had accumulated when it ran out goes into the next reduction, natively.

*State.* Shards stay with their ranks, so a joined rank must step them too: ``joinables.optimizer_step``. Unsharded
parameters and buffers come from the last joiner.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from join import Joinable
from joinables.replay.backward import ReplayedBackward
from joinables.replay.dry_run import Example
from joinables.replay.forward import ReplayedForward
from joinables.replay.module import ReplayedModule
from joinables.sharding import is_fsdp1


class Replay:
    """Says that a rank without data runs ``module`` itself, and with what.

    ``Join`` chooses it by itself for ``fully_shard`` modules and those that contain SyncBatchNorm.

    Args:
        module: any module. Of one that is neither DDP nor ``fully_shard`` only the collectives are met; its gradients
            are neither scaled nor weighed.
        example: what to call it with, if it cannot take an empty batch: a tuple of positional arguments, or a function
            that returns ``(args, kwargs)``. Without, a call of an active rank, with tensors of no rows.
        process_group: the ranks that train the module. By default those that its parameters are spread over (DDP: its
            group; a module without any ``DTensor``: the default group).

    Raises:
        TypeError: if ``module`` is no module, or FSDP1; if ``example`` is neither a tuple nor a function.
    """

    def __init__(self, module: torch.nn.Module, example: Example | None = None, process_group: Any = None) -> None:
        if not isinstance(module, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"module is a {type(module).__name__}, not a torch.nn.Module; give a module [J147]")
        refuse_fsdp1(module)
        if example is not None and not isinstance(example, tuple) and not callable(example):
            raise TypeError(
                f"example is a {type(example).__name__}; give a tuple of positional arguments, or a function that"
                " returns (args, kwargs) [J148]"
            )
        self.module, self.process_group = module, process_group
        self.example: Example | None = cast("Example | None", example)

    def joinables(self) -> list[Joinable]:
        """The module's forward and its backward."""
        module = ReplayedModule(self.module, self.example, self.process_group)
        forward = ReplayedForward(module)
        return [forward, ReplayedBackward(module, forward)]


def refuse_fsdp1(module: torch.nn.Module) -> None:
    """Raise a ``TypeError`` for a module that is, or contains, a ``FullyShardedDataParallel``."""
    if any(is_fsdp1(each) for each in module.modules()):
        raise TypeError(
            f"{type(module).__name__} shards its parameters with FullyShardedDataParallel (FSDP1), which Join cannot"
            " replay; use torch.distributed.fsdp.fully_shard (FSDP2) [J149]"
        )
