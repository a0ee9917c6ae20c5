"""Parameters that are trained in some backwards or epochs only: a fit on several processes equals one process."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from join import PeerError
from joinables.loss_gate import LossGate
from joinables.trainer import Callback, ModelCheckpoint, TrainModule
from tests.ending import Ending
from tests.harness import Pool, all_or_each, in_test_all
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state

SIZE = 12


class Adversaries(TrainModule):
    """A GAN whose critic stays frozen after each step of the generator, and which may begin frozen, too."""

    automatic_optimization = False

    def __init__(self, freezes_in: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.g = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 6))
        self.d = nn.Linear(6, 1)
        self.never = nn.Linear(6, 6).requires_grad_(False)
        self.freezes_in = freezes_in
        self.freeze("init")

    def freeze(self, where: str) -> None:
        if where == self.freezes_in:
            self.d.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        self.freeze("optimizers")
        return [torch.optim.SGD(self.g.parameters(), 0.1), torch.optim.Adam(self.d.parameters(), 0.05)]

    def on_train_start(self) -> None:
        self.freeze("start")

    def on_train_epoch_start(self) -> None:
        self.freeze("epoch")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        x = self.never(x)
        g_opt, d_opt = self.optimizers()
        self.d.requires_grad_(True)
        d_opt.zero_grad()
        self.manual_backward(self.d(self.g(x).detach()).tanh().mean() - self.d(x).tanh().mean())
        d_opt.step()
        self.d.requires_grad_(False)
        g_opt.zero_grad()
        self.manual_backward(-self.d(self.g(x)).tanh().mean())
        g_opt.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.d(self.g(batch[0])).mean())


def plays(rank: int, freezes_in: str, samples: int, ranks: int, shard: bool, folder: Path) -> Any:
    data = loader(samples, SIZE // ranks), loader(29, SIZE // ranks)
    module, keeper = Adversaries(freezes_in), ModelCheckpoint(folder, save_top_k=-1)
    run = trainer(strategy={"shard_optimizers": shard}, callbacks=keeper)
    for run.max_epochs in (2, 3):
        run.fit(module, *data)
    resumed, (second,) = Adversaries(freezes_in), folder.glob("epoch=1-*.ckpt")
    trainer(strategy={"shard_optimizers": shard}, max_epochs=3).fit(resumed, *data, ckpt_path=second)
    assert_same(flat_state(resumed.state_dict()), flat_state(module.state_dict()))
    return flat_state(module.state_dict())


@in_test_all
@pytest.mark.parametrize(
    ("freezes_in", "samples", "shard"),
    all_or_each(
        [
            ("step", 48, False),
            ("step", 50, True),
            ("step", 5, False),
            ("init", 50, False),
            ("init", 5, True),
            ("optimizers", 50, False),
            ("start", 48, True),
            ("epoch", 5, False),
        ]
    ),
)
def test_a_part_stays_frozen_after_the_step(
    pool: Pool, freezes_in: str, samples: int, shard: bool, tmp_path: Path
) -> None:
    expected = plays(0, freezes_in, samples, 1, False, tmp_path / "one")
    for state in pool.run(plays, freezes_in, samples, 2, shard, tmp_path / "two", ranks=2):
        assert_same(state, expected, TOLERANCE)


class Changes(Callback):
    """Freezes, unfreezes or adds parameters in a step or at the start of an epoch."""

    def __init__(self, kind: str, at: tuple[int, int]) -> None:
        self.kind, self.at = kind, at

    def change(self, trainer: Any, module: Any, step: int) -> None:
        if (trainer.current_epoch, step) != self.at:
            return
        if self.kind == "adds":
            module.body.append(nn.Linear(3, 3))
            module.optimizers().add_param_group({"params": list(module.body[4].parameters())})
        else:
            module.body[0].requires_grad_(self.kind == "unfreezes")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.body[0].requires_grad_(self.kind != "unfreezes")

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.change(trainer, module, -1)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.change(trainer, module, batch_idx)


def changes(rank: int, kind: str, at: tuple[int, int], samples: int, ranks: int, strategy: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    module = Classifier(optimizer="sgd")
    run = trainer(strategy=strategy, max_epochs=3, callbacks=Changes(kind, at))
    run.fit(module, loader(samples, SIZE // ranks), loader(29, SIZE // ranks))
    return flat_state(module.state_dict())


@pytest.mark.parametrize(
    ("kind", "samples", "option"),
    all_or_each(
        product(["freezes", "unfreezes", "adds"], [48, 50], ["", "shard_optimizers", "find_unused_parameters"])
    ),
)
def test_a_change_between_epochs(pool: Pool, kind: str, samples: int, option: str) -> None:
    expected = changes(0, kind, (1, -1), samples, 1, {})
    for state in pool.run(changes, kind, (1, -1), samples, 2, {option: True} if option else {}, ranks=2):
        assert_same(state, expected, TOLERANCE)


# With 18, one rank has no data when the step changes the module.
@pytest.mark.parametrize(("kind", "samples"), all_or_each(product(["freezes", "unfreezes"], [18, 48, 50])))
def test_a_change_within_an_epoch(pool: Pool, kind: str, samples: int) -> None:
    expected = changes(0, kind, (0, 1), samples, 1, {})
    for state in pool.run(changes, kind, (0, 1), samples, 2, {"find_unused_parameters": True}, ranks=2):
        assert_same(state, expected, TOLERANCE)


class Wraps(Callback):
    """Freezes a layer that no optimizer has, adds a layer while it is frozen, and unfreezes it."""

    def __init__(self) -> None:
        self.wrappers: list[Any] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        module.aside.requires_grad_(trainer.current_epoch in (0, 3))
        if trainer.current_epoch == 2:
            module.added = nn.Linear(6, 3)

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.wrappers.append(getattr(trainer.strategy, "ddp", None))


class Aside(Classifier):
    def __init__(self) -> None:
        super().__init__(optimizer="sgd")
        self.aside, self.added = nn.Linear(6, 3), None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.body.parameters(), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.aside(x) + (0 if self.added is None else self.added(x))


def keeps_its_wrapper(rank: int, samples: int, ranks: int) -> Any:
    module, wraps = Aside(), Wraps()
    run = trainer(strategy={"find_unused_parameters": True}, max_epochs=4, callbacks=wraps)
    run.fit(module, loader(samples, SIZE // ranks))
    return flat_state(module.body.state_dict()), [wraps.wrappers.index(each) for each in wraps.wrappers]


@pytest.mark.parametrize("samples", [50, 5])  # with 5, one rank has no data
def test_only_a_new_trainable_parameter_needs_a_new_wrapper(pool: Pool, samples: int) -> None:
    expected, _ = keeps_its_wrapper(0, samples, 1)
    for state, wrappers in pool.run(keeps_its_wrapper, samples, 2, ranks=2):
        assert_same(state, expected, TOLERANCE)
        assert wrappers == [0, 0, 2, 2]


def refuses(rank: int, *args: Any) -> str:
    with pytest.raises((RuntimeError, PeerError)) as caught:
        changes(rank, *args)
    return str(caught.value)


CHANGES = [("freezes", r"\(body\.0\.weight, body\.0\.bias\).*J640"), ("unfreezes", "J560"), ("adds", "J560")]


@pytest.mark.parametrize(
    ("kind", "text", "samples", "step"),
    all_or_each((*change, *at) for change in CHANGES for at in [(48, 1), (48, 3), (50, 3)]),
)
def test_a_change_that_the_wrapper_cannot_follow(ending: Ending, kind: str, text: str, samples: int, step: int) -> None:
    for found in ending.run(refuses, kind, (1, step), samples, 2, {}, ranks=2):
        assert re.search(text, found)


def test_a_gate_refuses_parameters_that_were_frozen() -> None:
    gate = LossGate(module := nn.Linear(1, 1).requires_grad_(False))
    gate(torch.zeros((), requires_grad=True))
    module.bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"The parameter 'bias' requires grad, but was frozen .*\[J560\]"):
        gate(module.bias.sum())


class Unused(Classifier):
    """Has a layer that the loss never reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.extra, self.frozen = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)


def leaves_some_unused(rank: int, samples: int) -> str:
    with pytest.raises((RuntimeError, PeerError)) as caught:
        trainer().fit(Unused(), loader(samples, 6))
    return str(caught.value)


@pytest.mark.parametrize("samples", [12, 24, 22, 6])  # the last, the next, a weighted step, and one without data
def test_parameters_that_the_loss_does_not_reach(ending: Ending, samples: int) -> None:
    for found in ending.run(leaves_some_unused, samples, ranks=2):
        assert "Unused (extra.weight, extra.bias)" in found
        assert "strategy='ddp_find_unused_parameters_true' to the Trainer" in found
