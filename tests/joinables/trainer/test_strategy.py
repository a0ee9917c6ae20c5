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

from joinables.trainer import Callback, DDPStrategy, SingleStrategy, Trainer, register_strategy, strategies
from joinables.trainer.ddp_strategy import to_batchnorm, to_sync_batchnorm
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import InPlace, trainer
from tests.pool import Pool

CPU = torch.device("cpu")


def wraps_once(rank: int) -> None:
    strategy = InPlace()
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
    with pytest.raises(TypeError, match="this DistributedDataParallel is one; pass the bare module"):
        strategy.wrap(DistributedDataParallel(nn.Linear(1, 1)), CPU, several_backwards=False)
    module.body.append(DistributedDataParallel(nn.Linear(3, 3)))
    with pytest.raises(TypeError, match=r"contains one \('body\.5'\)"):
        strategy.wrap(module, CPU, several_backwards=False)
    frozen = nn.Linear(1, 1).requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        strategy.wrap(frozen, CPU, several_backwards=False)


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
    run._last.state = None
    before = live_bytes()
    assert len(watches.wrappers) == 1, "one wrapper for all epochs and validations"
    assert watches.wrappers[0]() is None, "the wrapper, and with it the reducer and its buckets, is gone"
    run.test(module, data[1])
    run.predict(module, data[1])
    run.max_epochs = 3
    run.fit(module, *data)
    module.zero_grad()
    run._last.state = None
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
    with pytest.raises(ValueError, match="ddp_comm_wrapper wraps ddp_comm_hook"):
        DDPStrategy(ddp_comm_wrapper=default_hooks.fp16_compress_wrapper)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"find_unused_parameter": True}, TypeError, "neither .* Did you mean find_unused_parameters"),
        ({"bucket_cap": 1}, TypeError, "bucket_cap=1: neither DDPStrategy nor .* Did you mean bucket_cap_mb"),
        ({"device_ids": [0]}, TypeError, "the strategy gives device_ids"),
        ({"start_method": "spwan"}, ValueError, "start_method='spwan' is unknown; use one of spawn"),
        ({"timeout": -1}, ValueError, "timeout=-1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Told where they are given, and not by a worker."""
    with pytest.raises(kind, match=text):
        DDPStrategy(**options)


def test_a_strategy_that_is_given_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    given = DDPStrategy()
    run = Trainer(strategy=given, devices=2, accelerator="cuda", sync_batchnorm=True)
    assert not given.sync_batchnorm
    assert run.strategy.sync_batchnorm  # pyright: ignore[reportAttributeAccessIssue]


def test_sync_batchnorm_and_back() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm2d(2)), nn.SyncBatchNorm(2))
    parameters = list(module.parameters())
    state = {name: value.clone() for name, value in module.state_dict().items()}
    plain = [dict(vars(layer)) for layer in module.modules()]
    to_sync_batchnorm(module)
    assert [type(layer) for layer in (module[1], module[2][0])] == [nn.SyncBatchNorm] * 2
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True))
    to_batchnorm(module)
    assert [type(layer) for layer in (module[1], module[2][0], module[3])] == [
        nn.BatchNorm1d,
        nn.BatchNorm2d,
        nn.SyncBatchNorm,
    ]
    assert [vars(layer).keys() for layer in module.modules()] == [each.keys() for each in plain]
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    assert module[1](torch.randn(4, 2)).shape == (4, 2)


def test_registry() -> None:
    known = strategies()
    assert {"single", "ddp", "ddp_spawn", "ddp_zero", "ddp_spawn_find_unused_parameters_false"} <= known.keys()
    assert all(known.values())
    if "mine" not in known:
        register_strategy("mine", SingleStrategy, "one of my own")
    assert strategies()["mine"] == "one of my own"
    assert isinstance(Trainer(strategy="mine").strategy, SingleStrategy)
    with pytest.raises(ValueError, match="'mine' is registered already"):
        register_strategy("mine", SingleStrategy, "again")
    assert Trainer(strategy="ddp_find_unused_parameters_true", devices=2).strategy is not None
    with pytest.raises(TypeError, match="must be a name or a Strategy"):
        Trainer(strategy=3)  # type: ignore[arg-type]
