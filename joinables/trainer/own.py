"""Training over the collectives of another library than torch's: :class:`CollectiveStrategy`, for Horovod and XLA.

Any :class:`join.collectives.Collective` can average gradients. Before an optimizer step, the ranks sum their weighted
gradients, with the sums of the weights and the numbers of ranks that have a gradient, in one all-reduce::

    rank with data                                 rank without data
    --------------                                 -----------------
    backward of each batch, on this rank alone     .
    header: it announces the mean                  header: it announces nothing
    all-reduce of its gradients                    all-reduce of zeros
    optimizer step                                 .
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, cast

import torch
from typing_extensions import override

from join import Join
from join.collectives import Collective
from join.collectives.horovod import HorovodCollective
from join.collectives.xla import XLACollective
from join.joinable import Burst, OnGroup
from join.transfer import Exchange
from joinables.trainer.launch import Place
from joinables.trainer.strategy import Strategy, register_strategy


class Gradients(OnGroup, Burst):
    """Means of the gradients of a module over the batches of all ranks.

    Args:
        collective: The ranks.
        module: The module. The parameters and buffers of rank 0 are copied to all ranks.
    """

    def __init__(self, collective: Collective, module: torch.nn.Module) -> None:
        super().__init__(collective)
        self._collective, self._module = collective, module
        self._parameters = list(module.parameters())
        self._copy(0)

    def average(self, weight: float) -> None:
        """Replace gradients, the weighted sums over batches of this rank, by means over all ranks, all at once."""
        Join.notify_join_context(self)
        *sums, counts = self._sum(weight)
        if not (total := counts[0].item()):  # no batch weighs anything
            return
        users_of = cast("list[float]", counts[1:].tolist())
        for parameter, gradient, users in zip(self._parameters, sums, users_of, strict=True):
            if users:  # otherwise no rank has a gradient, as in a single process
                parameter.grad = (gradient / total).to(parameter.dtype).view_as(parameter)

    @override
    def main_hook(self) -> None:
        self._sum(None)

    def _sum(self, weight: float | None) -> Sequence[torch.Tensor]:
        """Return the sums over all ranks; with ``weight=None``, this rank adds nothing."""
        own = [None if weight is None else parameter.grad for parameter in self._parameters]
        counts = [weight or 0.0, *(float(gradient is not None) for gradient in own)]
        # float64 holds all other dtypes, but some devices lack it.
        widest = max((p.dtype for p in self._parameters), key=lambda dtype: dtype.itemsize, default=torch.float32)
        parts = [
            torch.zeros_like(p, dtype=widest).flatten() if g is None else g.flatten().to(widest)
            for p, g in zip(self._parameters, own, strict=True)
        ]
        device = parts[0].device if parts else "cpu"
        total = torch.cat([*parts, torch.tensor(counts, dtype=widest, device=device)])
        self._collective.finish(self._collective.all_reduce(total), on_cpu=total.is_cpu)
        return cast("Any", total).split([*(p.numel() for p in self._parameters), len(counts)])

    @override
    def own_tensors(self) -> Sequence[torch.Tensor]:
        return list(self._module.buffers())

    @override
    def exchange(self, source: int) -> Exchange:
        yield None
        yield ""
        self._copy(source)

    def _copy(self, source: int) -> None:
        for tensor in (*self._parameters, *self._module.buffers()):
            self._collective.finish(self._collective.broadcast(tensor.data, source), on_cpu=tensor.is_cpu)


class CollectiveStrategy(Strategy):
    """Training over another library's collective, in processes that its launcher has started.

    Args:
        timeout: Seconds that a rank waits for the others in a run, as in ``Join``.
    """

    is_distributed = True
    library: ClassVar[type[HorovodCollective] | type[XLACollective]]

    def __init__(self, *, timeout: float | None = None) -> None:
        super().__init__()
        self.timeout = timeout
        self._gradients: Gradients | None = None

    @override
    def place(self, world_size: int) -> Place:
        return Place(*self.library().place())

    @override
    def make_collective(self) -> Collective:
        return self.library()

    @override
    def check(self, *, several_backwards: bool) -> None:
        if several_backwards:
            raise ValueError(
                f"{type(self).__name__} averages gradients once in each step, of one rank in each process, so it"
                " supports neither manual optimization nor ranks that are threads. Remove automatic_optimization ="
                " False from the module, launch a process for each device, or train with strategy='ddp'. [J880]"
            )

    @override
    def wrap(self, module: torch.nn.Module, device: torch.device, *, several_backwards: bool, held: Any = ()) -> None:
        self.check(several_backwards=several_backwards)  # a hook may have changed that
        super().wrap(module, device, several_backwards=several_backwards, held=held)
        self._gradients = Gradients(self.collective, module)

    @override
    @contextlib.contextmanager
    def block(self, listed: Sequence[Any], *, enable: bool) -> Generator[None]:
        assert self._gradients is not None
        enable = enable or self.timeout is not None
        with Join([self._gradients, *listed, self], enable, timeout=self.timeout) as join:
            yield
        self.report = join.report

    @override
    def backward(self, loss: torch.Tensor, weight: float | None, *, sync: bool = True, **options: Any) -> None:
        assert self._gradients is not None
        weight = 1.0 if weight is None else weight
        (loss * weight).backward(**options)
        self._window += weight
        if sync:
            self._gradients.average(self._window)
            self._window = 0.0

    @override
    def teardown(self) -> None:
        super().teardown()
        self._gradients = None


class HorovodStrategy(CollectiveStrategy):
    """Training on the ranks of ``horovodrun``, whose processes run the same script."""

    library = HorovodCollective


class XLAStrategy(CollectiveStrategy):
    """Training on the ranks of ``torch_xla.launch``, such as TPU cores; the launched function uses the trainer."""

    library = XLACollective

    @override
    def check(self, *, several_backwards: bool) -> None:
        super().check(several_backwards=several_backwards or XLACollective().devices_of_process() > 1)

    @override
    def device(self, accelerator: str, place: Place) -> torch.device:
        return XLACollective().device()


register_strategy("horovod", HorovodStrategy)
register_strategy("xla", XLAStrategy)
