"""Uneven inputs with Transformers: :class:`JoinTrainer`, a mixin for ``transformers.Trainer`` and its subclasses.

::

    class MyTrainer(JoinTrainer, Trainer): ...

    MyTrainer(model, args, train_dataset=stream_of_this_rank, eval_dataset=another).train()

Each rank reads its own stream, as long as it is: nothing is dispatched, cut off or repeated. What makes a training
exact is Transformers' own arithmetic, which already counts tokens over a window of accumulation on all ranks, once the
ranks run the same windows::

    rank with batches                                rank that has run out
    -----------------                                ---------------------
    roll call of ``Join.iterate``                    the same
    a window of up to k micro-batches,               a window of k dummies, whose labels count no token
      after as many dummies as are missing
    all-reduce: how many have 0, 1, ... k of these   the same, with 0
    all-gather of the numbers of tokens              the same, with 0
    dummies: forward, backward; where nobody has     the same
      anything else, nothing
    micro-batches, the last one reduces gradients    the last dummy reduces nothing but zeros
    clip, step, log, evaluate, save                  the same

An evaluation in the midst of it is a loop of its own, over a process group of its own (``evaluation``).

Tried on Transformers 5.23.0 with Accelerate 1.15.0.
"""

from __future__ import annotations

from joinables.integrations.transformers.trainer import JoinTrainer

__all__ = ["JoinTrainer"]
