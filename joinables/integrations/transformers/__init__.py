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
    a window of up to k micro-batches, and as many   a window of k dummies, whose labels count no token
      dummies as are missing
    all-gather of the numbers of tokens; where none  the same, with 0
      are counted, all-reduce of micro-batches
    micro-batches, then dummies: forward, backward;  the same; it reduces nothing but zeros
      the last one reduces gradients
    clip, step, log, evaluate, save                  the same

An evaluation in the midst of it is a loop of its own, over a process group of its own (``evaluation``).

Tried on Transformers 5.23.0 with Accelerate 1.15.0.
"""

from __future__ import annotations

from joinables.integrations.transformers.trainer import JoinTrainer

__all__ = ["JoinTrainer"]
