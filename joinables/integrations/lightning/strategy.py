"""Uneven loaders in Lightning's ``Trainer``: :class:`JoinStrategy`.

Lightning has no hook for the fetchers of its loops: ``_select_data_fetcher`` of the loops' modules is replaced by
:func:`select_fetcher` while a trainer with this strategy runs.

Lightning's loops broadcast before each fetch without checking for missing ranks. So all ranks meet at the end of each
training step, where a rank that has skipped a backward raises.
"""

# The types of Lightning's results are unknown to the type checker.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar, Literal

import torch
from torch.distributed.algorithms.join import Joinable as TorchJoinable
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from join import Join
from join.collectives import collective_of
from join.errors import advise
from join.joinable import NothingListed
from join.mean import mean_over_ranks
from joinables.integrations import warn_if_alone
from joinables.integrations.lightning.blocks import Blocks
from joinables.integrations.lightning.loaders import Fetcher, InjectedRank, Loader, share_length, trim
from joinables.integrations.lightning.logged import LoggedValues, metrics_of
from joinables.integrations.lightning.names import LOOPS, Callback, DDPStrategy, StrategyRegistry, select_data_fetcher
from joinables.loss_gate import LossGate
from joinables.modules import replaced

SKIP = "To ignore a batch, return loss * 0, or return 0 for it from the function in JoinStrategy(weigh=function)."
SKIPPED = "Skipping the `training_step` by returning None"
"""Beginning of an error of Lightning's own, whose advice does not say what to do."""
STOP = "To stop, set trainer.should_stop or return -1 on all ranks in the same step: strategy.reduce_boolean_decision."
UNUSED = "Pass Trainer(strategy='join_find_unused_parameters_true')."
ADVICE = {
    "J067 J555": "Yield tensors in lists, tuples, dicts or dataclasses from the loader.",
    "J089": "Call the module only in the thread that called fit, and only in its steps.",
    "J092 J810": STOP,
    "J093": f"{STOP} {SKIP}",
    "J104": "Pass Trainer(sync_batchnorm=False).",
    "J113": SKIP,
    "J291": "JoinStrategy wraps the whole LightningModule. Do not wrap its parts.",
    "J441": "Change parameters and learning rates alike on all ranks. Let schedulers monitor means over ranks.",
    "J460 J461": "Call self.manual_backward(loss) for every loss.",
    "J471": "Remove no_sync from the LightningModule, whose steps all reduce gradients.",
    "J473": UNUSED,
    "J536": "Remove it from the arguments of JoinStrategy, and step optimizers after the backward.",
    "J560": f"Let all parameters require grad when fit begins, and freeze them in on_train_start. {UNUSED}",
    "J822": "Let the loader yield copies of its batches.",
}
"""By the codes of errors whose advice Lightning's users cannot follow: the advice that replaces it."""


class JoinStrategy(DDPStrategy):
    """DDP for loaders of any lengths, and empty ones: ``Trainer(strategy=JoinStrategy(), devices=2)``.

    All ranks run the same number of steps in the trainer's loops. A rank that is out of batches receives dummies,
    copies of its last batch. Dummies count in no gradient, buffer or logged value. A step that keeps sums of its own
    checks :attr:`shadowing`. In ``predict``, each rank runs one step for each of its batches.

    Args:
        weigh: The weight of a batch in gradients and in logged means over ranks. ``"samples"`` is its number of
            samples, and ``"equal"`` the same weight for each batch. A function receives the batch as the loader yields
            it, and returns a number that is not negative, such as its number of tokens. Return a loss that is the mean
            over the counted samples or tokens.
        **options: Options of Lightning's ``DDPStrategy``, which passes others on to ``DistributedDataParallel``.

    Raises:
        ValueError: If ``weigh`` is none of these; when fitting, if the module contains ``DistributedDataParallel``, or
            a validation begins in an accumulation window.
        TypeError: When fitting, if a step takes ``dataloader_iter``.
    """

    strategy_name: ClassVar[str] = "join"

    def __init__(
        self, *args: Any, weigh: Literal["samples", "equal"] | Callable[[Any], float] = "samples", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._forward_redirection = _called_directly
        self._blocks = Blocks(weigh)
        self._failure: BaseException | None = None  # the error of closing a failed run's block
        self._trainer: Any = None
        self._first = FirstCallback()
        self._replaced = ExitStack()

    # -- setting up ---------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # Not later: hooks of the user may ask for trainer.estimated_stepping_batches, which sets up the data.
        for module in LOOPS:
            self._replaced.enter_context(replaced(module, "_select_data_fetcher", select_fetcher))

    @override
    def setup(self, trainer: Any) -> None:
        self._trainer, self._failure = trainer, None
        super().setup(trainer)
        warn_if_alone("JoinStrategy", self.world_size, "Pass devices=... and num_nodes=... to the Trainer.")
        if self._first not in trainer.callbacks:
            trainer.callbacks.insert(0, self._first)
        fit = trainer.fit_loop.epoch_loop
        for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop):
            loop._results = LoggedValues(loop is fit, self._blocks, self)

    @override
    def _setup_model(self, model: torch.nn.Module) -> DistributedDataParallel:
        return super()._setup_model(LossGate(model))

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        options = super().distributed_sampler_kwargs
        return {**options, "rank": InjectedRank(options["rank"])}

    @override
    def process_dataloader(self, dataloader: Any) -> Loader:
        prepared = super().process_dataloader(dataloader)
        trim(prepared)
        return share_length(prepared)

    @override
    def teardown(self) -> None:
        self._replaced.close()
        if self._trainer is not None and self._first in self._trainer.callbacks:
            self._trainer.callbacks.remove(self._first)
        super().teardown()

    @property
    def shadowing(self) -> bool:
        """Whether the current batch is a dummy, which must not count: ``self.trainer.strategy.shadowing`` in a step."""
        return self._blocks.is_dummy

    # -- loops --------------------------------------------------------------------------------------------------------

    def fetcher(self, trainer: Any, stage: Any) -> Fetcher:
        """Return the fetcher of the batches of a loop.

        Args:
            trainer: The Lightning trainer.
            stage: Lightning's ``RunningStage``.
        """
        step = {"train": "training_step", "test": "test_step"}.get(stage, "validation_step")
        if "dataloader_iter" in inspect.signature(getattr(self.lightning_module, step)).parameters:
            raise TypeError(
                f"{step} takes dataloader_iter, but JoinStrategy has to fetch the batches itself. Define it as"
                f" {step}(self, batch, batch_idx). [J130]"
            )
        if stage != "train":
            if self._blocks.is_in_window:
                raise ValueError(
                    "A validation begins in the middle of an accumulation window, whose gradients would be lost."
                    " Set val_check_interval to a multiple of accumulate_grad_batches. [J131]"
                )
            return Fetcher(self._blocks, self._join_of_evaluation, trainer, trains=False)
        return Fetcher(self._blocks, self._join_of_training, trainer, trains=True)

    def _join_of_training(self) -> Join:
        # Schedulers and other optimizers take the same steps on all ranks.
        sharded = [optimizer for optimizer in self.optimizers if isinstance(optimizer, TorchJoinable)]
        return Join(
            [self.model, *sharded, *metrics_of(self.lightning_module)],
            loss_divided_by=self._trainer.accumulate_grad_batches,
            divide_by_initial_world_size=False,
        )

    def _join_of_evaluation(self) -> Join:
        return Join([NothingListed(None), *metrics_of(self.lightning_module)])

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._blocks.trains and not (self._blocks.is_in_window or self._trainer.interrupted):
            self._blocks.close()  # until then, a rank without data has other buffers
        return super().lightning_module_state_dict()

    # -- steps --------------------------------------------------------------------------------------------------------

    @override
    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        pass  # DDP sees a forward of the gate before each backward

    post_backward = pre_backward

    @override
    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().backward(self._blocks.scale(self.model(closure_loss)), optimizer, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(tensor, torch.Tensor) and reduce_op in ("mean", "avg"):
            if not tensor.is_floating_point():  # Lightning rounds a mean of whole numbers down
                tensor = tensor.to(torch.get_default_dtype())
            if self._blocks.in_step:
                return mean_over_ranks(collective_of(group), tensor, self._blocks.weight)
        # Lightning's own votes are sums with ReduceOp.SUM, and a rank on a dummy votes, too.
        elif isinstance(tensor, torch.Tensor) and reduce_op == "sum" and self._blocks.in_step and self._blocks.is_dummy:
            tensor = torch.zeros_like(tensor)
        return super().reduce(tensor, group, reduce_op)

    @override
    def all_gather(self, tensor: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        if self._blocks.in_step:
            raise TypeError(
                "self.all_gather in a step would return rows of dummies too. Call self.log(..., sync_dist=True). [J522]"
            )
        return super().all_gather(tensor, *args, **named)

    @override
    def block_backward_sync(self) -> AbstractContextManager[None]:
        # Under manual optimization only the module knows its windows, and a window may outlive the loop's step.
        is_automatic = self.lightning_module.automatic_optimization
        return super().block_backward_sync() if is_automatic else nullcontext()

    # -- failure ------------------------------------------------------------------------------------------------------

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        # After an interruption the other ranks do not call it.
        if self._trainer is None or not self._trainer.interrupted:
            super().barrier(*args, **kwargs)

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._failure is not None:
            raise self._failure from exception


class FirstCallback(Callback):
    """First callback of a trainer, so that the others see synchronised state, or the error of all ranks."""

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.enable_validation and trainer.val_check_batch is None:
            raise ValueError(
                "With a time as val_check_interval, each rank has a clock of its own. Pass a number of batches. [J886]"
            )

    @override
    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        trainer.strategy._blocks.in_step = True

    @override
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        logged, blocks = trainer._results, trainer.strategy._blocks
        logged.reduce_step(changed=blocks.end_step(logged.have_changed()))

    on_validation_batch_start = on_test_batch_start = on_train_batch_start

    @override
    def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.strategy._blocks.in_step = False

    on_test_batch_end = on_validation_batch_end

    @override
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy._blocks.end()
        trainer._results.agree()

    @override
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        advise(exception, ADVICE)
        if str(exception).startswith(SKIPPED):
            exception.args = (f"{exception} {SKIP}",)
        try:
            trainer.strategy._blocks.close(exception)  # sends it to the other ranks
        except Exception as failure:  # another rank failed first, and caused the failure of this one
            advise(failure, ADVICE)
            trainer.strategy._failure = failure


def _called_directly(wrapper: Any, module: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a step on the ``LightningModule`` itself, without its wrapper: only the loss passes through that."""
    return getattr(module, method)(*args, **kwargs)


def select_fetcher(trainer: Any, stage: Any) -> Any:
    """Return the fetcher of a trainer's loop: from a strategy with a method ``fetcher``, or Lightning's own."""
    fetcher = getattr(trainer.strategy, "fetcher", None)
    return select_data_fetcher(trainer, stage) if fetcher is None else fetcher(trainer, stage)


_OPTIONS: dict[str, Any] = {"join": {}, "join_find_unused_parameters_true": {"find_unused_parameters": True}}
for _name, _options in _OPTIONS.items():
    StrategyRegistry.register(_name, JoinStrategy, description="DDP for uneven loaders", override=True, **_options)
