"""Who wraps the module, how often, and what is left of it afterwards."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from joinables.trainer import Callback, Strategy, Trainer, register_strategy, strategies
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import InPlace, trainer

CPU = torch.device("cpu")


def wraps_once(rank: int) -> None:
    strategy = InPlace()
    strategy.setup(dist.get_rank(), dist.get_world_size())
    module = Classifier()
    strategy.wrap(module, CPU, several_backwards=False)
    first = strategy.ddp
    strategy.wrap(module, CPU, several_backwards=False)
    assert strategy.ddp is first
    strategy.wrap(Classifier(), CPU, several_backwards=False)
    assert strategy.ddp is not first
    strategy.wrap(module, CPU, several_backwards=False)
    second = strategy.ddp
    module.body.append(nn.Linear(3, 3))
    strategy.wrap(module, CPU, several_backwards=False)
    assert strategy.ddp is not second
    with pytest.raises(TypeError, match=r"DistributedDataParallel contains .* Pass the bare module"):
        strategy.wrap(DistributedDataParallel(nn.Linear(1, 1)), CPU, several_backwards=False)
    module.body.append(DistributedDataParallel(nn.Linear(3, 3)))
    with pytest.raises(TypeError, match="Classifier contains"):
        strategy.wrap(module, CPU, several_backwards=False)


def test_a_module_is_wrapped_once(pool: Pool) -> None:
    pool.run(wraps_once, ranks=2)


class Watches(Callback):
    """Keeps weak references to the wrapper and the number of them."""

    def __init__(self) -> None:
        self.wrappers: list[weakref.ref[Any]] = []

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        ddp = trainer.strategy.ddp
        if not any(ref() is ddp for ref in self.wrappers):
            self.wrappers.append(weakref.ref(ddp))


def live_bytes() -> int:
    gc.collect()
    return sum(each.untyped_storage().nbytes() for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def leaves_nothing(rank: int) -> None:
    watches = Watches()
    run = trainer(max_epochs=2, callbacks=watches)
    module = Classifier()
    module.big = nn.Linear(1000, 1000)  # 4 MB, and as much of buckets

    def step(batch: Any, batch_idx: int) -> torch.Tensor:
        return Classifier.training_step(module, batch, batch_idx) + module.big.weight.sum() + module.big.bias.sum()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]

    module.training_step = step
    data = loader(50, 4), loader(20, 4)
    run.fit(module, *data)
    module.zero_grad()
    run._last_state = None
    before = live_bytes()
    assert len(watches.wrappers) == 1, "one wrapper for all epochs and validations"
    assert watches.wrappers[0]() is None, "the wrapper, and with it the reducer and its buckets, is gone"
    run.test(module, data[1])
    run.predict(module, data[1])
    run.max_epochs = 3
    run.fit(module, *data)
    module.zero_grad()
    run._last_state = None
    assert len(watches.wrappers) == 2
    assert watches.wrappers[1]() is None
    assert live_bytes() <= before + 1000
    assert not module._forward_hooks
    assert not module._backward_hooks
    assert all(not parameter._backward_hooks for parameter in module.parameters())


def test_teardown_drops_the_wrapper(pool: Pool) -> None:
    pool.run(leaves_nothing, ranks=2)


def with_hook(rank: int, wrapped: bool) -> list[float]:
    strategy = {
        "ddp_comm_state": dist.group.WORLD,
        "ddp_comm_hook": default_hooks.allreduce_hook,
        "ddp_comm_wrapper": default_hooks.fp16_compress_wrapper if wrapped else None,
        "bucket_cap_mb": 1,
    }
    module = Classifier()
    trainer(strategy=strategy, max_epochs=2).fit(module, loader(50, 4))
    return [parameter.sum().item() for parameter in module.parameters()]


def test_comm_hooks(pool: Pool) -> None:
    module = Classifier()
    trainer(max_epochs=2).fit(module, loader(50, 8))
    expected = [parameter.sum().item() for parameter in module.parameters()]
    for wrapped, tolerance in ((False, 1e-5), (True, 0.1)):
        first, second = pool.run(with_hook, wrapped, ranks=2)
        assert first == second
        assert first == pytest.approx(expected, abs=tolerance)
    assert first != pytest.approx(expected, abs=1e-7), "the wrapper had no effect"


def test_registry() -> None:
    known = strategies()
    assert {"single", "ddp", "ddp_spawn", "ddp_zero", "ddp_find_unused_parameters_true"} <= {*known}
    if "mine" not in known:
        register_strategy("mine", Strategy)
    assert "mine" in strategies()
    assert isinstance(Trainer(strategy="mine").strategy, Strategy)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register_strategy("mine", Strategy)
    assert Trainer(strategy="ddp_find_unused_parameters_true", devices=2).strategy is not None
