"""Base classes of users' modules and callbacks: :class:`TrainModule`, :class:`Callback`.

A ``TrainModule`` is a ``torch.nn.Module`` whose methods define a step and the optimizers; the trainer does the rest.
Its methods have the names of a LightningModule's, so a LightningModule that uses only these runs unchanged with this
base.

The order of calls (``*`` is ``validation``, ``test`` or ``predict``)::

    prepare_data    on the first rank of each machine
    setup

    on_train_start
    an epoch      on_train_epoch_start
      a batch       on_train_batch_start, training_step, on_before_optimizer_step, on_train_batch_end
      validation    as below
                  on_train_epoch_end
    on_train_end

    *_step for each batch, on_*_epoch_end

    add_to_queue      on rank 0
    teardown
    get_from_queue    on rank 0, in the process that called fit

The annotation of ``trainer`` is ``Any``, since the file that defines ``Trainer`` imports this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, ClassVar, Literal

import torch
from typing_extensions import override

from join.collectives._torch_private import Writes, pytree, writes_to
from joinables.trainer.arguments import REST, lacking
from joinables.trainer.metrics import Reduction


class Queue(list[Any]):
    """List of objects that travel to the process that started a run, with the methods of a queue."""

    def put(self, item: Any) -> None:
        """Add an object."""
        self.append(item)

    def get(self) -> Any:
        """Remove and return the first object."""
        return self.pop(0)


class TrainModule(torch.nn.Module):
    """Base of modules that a :class:`Trainer` trains.

    Override ``training_step`` and ``configure_optimizers`` to fit, and ``validation_step``, ``test_step`` or
    ``predict_step`` for the other runs. The hooks between the steps, the ``on_...`` methods, do nothing unless
    overridden.

    All ranks call the hooks of a run and of an epoch at the same time, so these may communicate. Hooks of a batch, of
    an optimizer step and of a checkpoint must not: ranks without data do not call them, and only one rank writes a
    checkpoint. Hooks of an evaluation run in eval mode and without grad, as its steps do.

    Parts that are in eval mode when a fit begins, such as frozen BatchNorm layers, stay in eval mode. A module that is
    in eval mode as a whole is put into training mode.

    With ``automatic_optimization = False``, the training step itself calls ``manual_backward`` and steps the optimizers
    that ``optimizers()`` returns.
    """

    automatic_optimization: bool = True
    _trainer: Any = None
    _toggled: Sequence[tuple[torch.nn.Parameter, bool]] = ()

    # -- what a user overrides ----------------------------------------------------------------------------------------

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the mean loss over the samples of a batch: a tensor, or a dict with it under ``"loss"``."""
        raise NotImplementedError

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch without grad, and record metrics with ``self.log``."""
        raise NotImplementedError

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        """Evaluate one batch without grad, and record metrics with ``self.log``."""
        raise NotImplementedError

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the outputs for one batch; by default the module's output for it, or for a tuple's first element."""
        return self(batch[0] if isinstance(batch, (tuple, list)) else batch)

    def configure_optimizers(self) -> Any:
        """Return an optimizer, or a dict, or several of them in a list.

        A dict has the keys ``"optimizer"`` and ``"lr_scheduler"``. A scheduler is stepped after every epoch, or, in the
        form ``{"scheduler": s, "interval": "step"}``, after every optimizer step. A ``ReduceLROnPlateau`` has the form
        ``{"scheduler": s, "monitor": metric}``.
        """
        raise NotImplementedError

    def batch_size(self, batch: Any) -> int | None:
        """Return the number of samples in a batch, which weighs its gradients and metrics.

        Override it if the trainer counts wrong. A batch of 0 samples counts for nothing. By default, and for ``None``,
        the trainer counts the elements of the data set that a ``DataLoader`` puts into the batch. For other loaders,
        and if no tensor of the batch has that length, it counts the rows of the first tensor. Without tensors, it asks
        objects for ``num_graphs`` or their length.
        """

    # -- hooks that a user may override -------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Called first in a run, on one rank of each machine, while the others wait: download or convert data here.

        Attributes that are set here do not reach the other ranks.
        """

    def setup(self, stage: str) -> None:
        """Called on every rank after ``prepare_data``, before the optimizers are made; may add parts to the module.

        Args:
            stage: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
        """

    def teardown(self, stage: str) -> None:
        """Called last in a run, even if it raised."""

    def results_to_return(self) -> Any:
        """Return the argument of ``take_results``; called on rank 0 only.

        If processes were started for the run, attributes that this module has gained there would be lost otherwise.
        The result can be anything that pickle supports, such as numbers, lists and tensors. Tensors arrive on the CPU.
        The hook is called after the other hooks of the stage, before ``teardown``, and must not communicate.
        """

    def add_to_queue(self, queue: Queue) -> None:
        """Put objects into ``queue``, as :meth:`results_to_return` returns one; by default that one."""
        queue.put(self.results_to_return())

    def get_from_queue(self, queue: Queue) -> None:
        """Get the objects that :meth:`add_to_queue` has put; by default one, for :meth:`take_results`."""
        self.take_results(queue.get())

    def take_results(self, results: Any) -> None:
        """Take the result of ``results_to_return``; called last, on rank 0, when the weights are loaded.

        It is called in the process that called ``fit``, whether that process has trained or has started others.
        """

    def on_train_start(self) -> None:
        """Called before the first epoch of a fit."""

    def on_train_epoch_start(self) -> None:
        """Called before the first batch of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        """Called before a training step, with its batch on the device; if it returns -1, the epoch ends."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before ``optimizer`` steps; may change the gradients, such as by ``clip_gradients(optimizer, 1.0)``.

        With a sharded optimizer, a rank without data calls this too. It has the same gradients and steps its shard.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training step, which returned ``outputs``, and after the optimizer step if one followed."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch and its validation."""

    def on_train_end(self) -> None:
        """Called after the last epoch of a fit."""

    def on_validation_epoch_end(self) -> None:
        """Called after the validation batches, before their metrics are averaged."""

    def on_test_epoch_end(self) -> None:
        """Called after the test batches, before their metrics are averaged."""

    def on_predict_epoch_end(self) -> None:
        """Called after the batches of a prediction."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add entries to a checkpoint."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read entries from a checkpoint before it is loaded, or replace them, such as ``"module"``, the weights.

        ``fit``, ``validate``, ``test`` and ``predict`` call it if they get a ``ckpt_path``, on all ranks.
        """

    # -- what a user calls --------------------------------------------------------------------------------------------

    @property
    def trainer(self) -> Any:
        """:class:`Trainer` of the current run.

        Raises:
            RuntimeError: Outside a run.
        """
        if self._trainer is None:
            raise RuntimeError(f"No Trainer runs this {type(self).__name__}. Call this in a hook or a step. [J261]")
        return self._trainer

    def log(
        self, name: str, value: float | torch.Tensor, *, reduce_fx: Reduction = "mean", batch_size: int | None = None
    ) -> None:
        """Record a metric.

        At the end of the epoch, ``trainer.callback_metrics[name]`` is its mean over all samples of all ranks. The
        number of processes does not change it. If a step logs several values under one name, all of them count.

        Args:
            name: The metric's name.
            value: A number, or a tensor with one element. For ``"mean"``, it is the mean over the samples of the batch.
            reduce_fx: The reduction of the values to one. ``"mean"`` weights them by their numbers of samples.
            batch_size: The number of samples that the value is the mean of; by default, the samples of the batch.

        Raises:
            ValueError: If ``reduce_fx`` is unknown, or differs from the metric's previous one.
            TypeError: If the value is not one number.
            RuntimeError: In a prediction.
        """
        self.trainer.run.record(name, value, batch_size, reduce_fx)

    def optimizers(self) -> Any:
        """Return the optimizer of the run, or a list if it has several."""
        return _one_or_all(self.trainer.run.optimizers)

    def lr_schedulers(self) -> Any:
        """Return the scheduler of the run, a list if it has several, or ``None`` without any."""
        return _one_or_all([stepped.scheduler for stepped in self.trainer.run.schedulers]) or None

    def manual_backward(
        self, loss: torch.Tensor, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """Compute gradients, averaged over the ranks, if ``automatic_optimization`` is ``False``.

        Args:
            loss: The mean over the samples of the batch.
            retain_graph: As of ``torch.Tensor.backward``. Its ``inputs`` are no option, since DDP would wait for the
                gradients of all other parameters.
            create_graph: As of ``torch.Tensor.backward``.
        """
        self.trainer.run.backward(loss, retain_graph=retain_graph, create_graph=create_graph)

    def toggle_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Freeze the parameters of other optimizers, until :meth:`untoggle_optimizer`, as for a GAN."""
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self.untoggle_optimizer(optimizer)
        self._toggled = [(parameter, parameter.requires_grad) for parameter in self.parameters()]
        for parameter, required in self._toggled:
            parameter.requires_grad_(required and id(parameter) in held)

    def untoggle_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Unfreeze the parameters that :meth:`toggle_optimizer` has frozen."""
        for parameter, required in self._toggled:
            parameter.requires_grad_(required)
        self._toggled = []

    def clip_gradients(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Literal["norm", "value"] = "norm",
    ) -> None:
        """Clip the gradients of an optimizer's parameters, by their norm together, or each by its value."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        clip = "clip_grad_norm_" if gradient_clip_algorithm == "norm" else "clip_grad_value_"
        if gradient_clip_val is not None:
            getattr(torch.nn.utils, clip)(parameters, gradient_clip_val)

    @property
    def logger(self) -> Any:
        """First logger of the trainer; ``None`` without one."""
        return self.trainer.logger

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # Python finds an attribute of the class before a part of the module, so the part would never run.
        if isinstance(value, torch.nn.Module) and hasattr(type(self), name):
            raise ValueError(
                f"{type(self).__name__} gets a part called {name!r}, which {name!r} of its class would hide. Use"
                f" another name for the part. If a checkpoint has it as {name!r}, rename it there in"
                " on_load_checkpoint. [J872]"
            )
        super().__setattr__(name, value)

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):
                raise
            raise lacking(self, name, TrainModule) from None

    def __getstate__(self) -> dict[str, Any]:
        state = dict(super().__getstate__())
        state.pop("_trainer", None)  # a copy of the module belongs to no run
        return state


def _one_or_all(objects: Sequence[Any]) -> Any:
    return objects[0] if len(objects) == 1 else list(objects)


class Callback:
    """Base of callbacks: objects that a trainer calls at certain points of a run.

    A callback has any hooks of :class:`TrainModule` from ``setup`` to ``teardown``, under the same names. Each receives
    the :class:`Trainer` and its module before the arguments of the module's hook, which is called first, such as
    ``on_train_batch_end(self, trainer, module, outputs, batch, batch_idx)``. The same hooks may communicate, by
    ``trainer.strategy``.
    """

    is_last: ClassVar[bool] = False
    """Whether a trainer calls the other callbacks first."""

    @property
    def state_key(self) -> str:
        """Name of this callback's state in checkpoints; each callback of a trainer needs its own."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints and for the process that started the run: plain data and tensors."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state."""


# -- checks -----------------------------------------------------------------------------------------------------------

_HOOK = re.compile(
    r"(on_|configure_)\w+|(optimizer|lr_scheduler)_step|optimizer_zero_grad|backward|transfer_batch_to_device"
    r"|\w+_(step|epoch)_end|\w+_(to|from)_queue|\w+_dataloader"
)
"""The names of hooks. A method of such a name that the trainer does not call would be left out silently."""


def check_module(module: Any, stage: str) -> None:
    """Raise a ``TypeError`` for a module without a method that the stage needs, or with hooks that are never called."""
    if not isinstance(module, TrainModule):
        kind = type(module).__name__
        raise TypeError(f"module is of type {kind}. Derive its class from joinables.trainer.TrainModule. [J181]")
    needed = {
        "fit": ("training_step", "configure_optimizers"),
        "validate": ("validation_step",),
        "test": ("test_step",),
    }
    for name in needed.get(stage, ()):
        if not overrides(module, name):
            raise TypeError(f"{type(module).__name__} has no {name}, which {stage} calls. Define that method. [J182]")
    refuse_hooks(module)


def overrides(hooked: TrainModule | Callback, name: str) -> bool:
    """Return whether a module or a callback has a method of its own with this name."""
    base = TrainModule if isinstance(hooked, TrainModule) else Callback
    return name in vars(hooked) or getattr(type(hooked), name, None) is not getattr(base, name, None)


def own_tensors(objects: Sequence[TrainModule | Callback], before: Mapping[str, Writes] | None) -> dict[str, Writes]:
    """Return the writes to tensors that hooks of batches may change, and that a rank out of data does not receive.

    It receives parameters and buffers of the module, even if another attribute holds them, too.

    The keys are the names of attributes, which hold modules, or tensors that ``before`` has, too, in any containers.
    """
    own, writes = vars(torch.nn.Module()), dict[str, Writes]()
    trained = [each for each in objects if isinstance(each, torch.nn.Module)]
    received = {id(tensor) for each in trained for tensor in (*each.parameters(), *each.buffers())}
    for each in objects:
        changes = overrides(each, "on_train_batch_start") or overrides(each, "on_train_batch_end")
        if not changes or (isinstance(each, Callback) and overrides(each, "state_dict")):
            continue
        for name in vars(each).keys() - own:
            leaves: list[Any] = pytree.tree_leaves(vars(each)[name])
            modules = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Module)]
            parts = [*leaves, *(part for module in modules for part in (*module.parameters(), *module.buffers()))]
            tensors = (part for part in parts if isinstance(part, torch.Tensor) and id(part) not in received)
            key = f"{type(each).__name__}.{name}"
            if modules or before is None or before.get(key):  # otherwise it has been made of the last batch
                writes[key] = writes_to(tensors)
    return writes


def refuse_hooks(hooked: object) -> None:
    """Raise a ``TypeError`` for a module or a callback with hooks that a trainer does not call."""
    kind = type(hooked)
    known = hooks = [name for name in vars(TrainModule) if not name.startswith("_")]
    if not isinstance(hooked, TrainModule):  # of the module's hooks, a callback has those around its steps
        known = [name for name in hooks if name.startswith("on_") or name in ("setup", "teardown")]
    names = (name for name in dir(kind) if (_HOOK.fullmatch(name) or name in hooks) and name not in known)
    if uncalled := [name for name in names if callable(getattr(kind, name))]:
        near = dict.fromkeys(close for name in uncalled for close in get_close_matches(name, known, 1, 0))
        raise TypeError(
            f"{kind.__name__} has hooks that the trainer does not call: {', '.join(uncalled)}. Move their statements"
            f" into hooks that it calls, such as {', '.join(near)}, and rename methods that are not meant as hooks."
            f" {REST}. [J210]"
        )
