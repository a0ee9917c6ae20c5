"""Uneven and empty loaders in Lightning's ``Trainer``: :class:`JoinStrategy`, also as ``strategy="join"``.

::

    from joinables.integrations.lightning import JoinStrategy

    Trainer(strategy=JoinStrategy(), devices=2).fit(module, loader)

A step of the trainer on all ranks, with what communicates::

    rank with data                                   rank without
    --------------                                   ------------
    roll call of the loop is read, the next starts   the same
    its batch                                        a dummy, with no samples
    training_step, on the module itself              the same; what it logs counts nothing
    the loss goes through DDP around a LossGate:     the same; what its forward did to buffers is
      buffers of the lowest rank with data             replaced by these
    backward: gradients times weight, summed         zeros, with weight 0
    optimizer and schedulers step                    the same

The block around such steps is closed for a validation, for a checkpoint and at the end of an epoch, so that these find
the same state on all ranks. Validation and test run in blocks of their own, one for each loader.

In Fabric, list what it has set up: ``Join([fabric_model, fabric_optimizer])``.
"""

from __future__ import annotations

from joinables.integrations.lightning.strategy import JoinStrategy

__all__ = ["JoinStrategy"]
