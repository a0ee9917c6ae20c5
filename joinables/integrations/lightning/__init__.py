"""Uneven and empty loaders in Lightning's ``Trainer``: :class:`JoinStrategy`, or ``strategy="join"``.

::

    from joinables.integrations.lightning import JoinStrategy

    Trainer(strategy=JoinStrategy(), devices=2).fit(module, loader)

A step of the trainer on all ranks, with its collectives::

    rank with data                                   rank without data
    --------------                                   -----------------
    roll call of the loop is read, the next starts   the same
    its batch                                        a dummy, with no samples
    training_step, on the module itself              the same; its logged values count nothing
    the loss goes through DDP around a LossGate:     the same; these buffers replace the changes of
      buffers of the lowest rank with data             its own forward
    backward: gradients times weight, summed         zeros, with weight 0
    optimizer and schedulers step                    the same

The block around such steps is closed for a validation, for a checkpoint and at the end of an epoch, so that these find
the same state on all ranks. Validation and test run in blocks of their own, one for each loader.

In Fabric, list the objects that it has set up: ``Join([fabric_model, fabric_optimizer])``.
"""

from __future__ import annotations

from joinables.integrations.lightning.strategy import JoinStrategy

__all__ = ["JoinStrategy"]
