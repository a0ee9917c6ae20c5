"""A module's hooks are called, each in its place; and there is none that waits in vain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from joinables.trainer import Callback, Trainer, TrainModule
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state

HOOKS = {name for name in vars(TrainModule) if name.startswith("on_") and "checkpoint" not in name}
HOOKS |= {"prepare_data", "setup", "teardown", "training_step", "validation_step", "test_step", "predict_step"}
HOME = ["get_from_queue", "take_results"]
HOOKS |= {"add_to_queue", "results_to_return", *HOME}


class Notes(Classifier):
    """Notes which hooks and steps are called, in what mode."""

    notes: list[tuple[str, bool, bool]]

    def __init__(self) -> None:
        super().__init__()
        self.notes = []

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS:
            self.notes.append((name, self.training, torch.is_grad_enabled()))
        return super().__getattribute__(name)


class Brings(Callback):
    """Brings the notes home."""

    notes: list[Any]

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.notes = module.notes

    def state_dict(self) -> dict[str, Any]:
        return vars(self)

    def load_state_dict(self, state: Any) -> None:
        vars(self).update(state)


def test_hooks_are_called_in_order() -> None:
    def evaluation(name: str, batches: int) -> list[str]:
        return [*[f"{name}_step"] * batches, f"on_{name}_epoch_end"]

    step = ["on_before_optimizer_step"]
    batches = ["on_train_batch_start", "training_step", "on_train_batch_end"]
    accumulated = [*batches, *batches[:2], *step, batches[2]]
    begins, ends = ["prepare_data", "setup"], ["add_to_queue", "results_to_return", "teardown", *HOME]
    training = [*begins, "on_train_start", "on_train_epoch_start", *accumulated, *batches[:2], *step, batches[2]]
    expected = [*training, *evaluation("validation", 2), "on_train_epoch_end", "on_train_end", *ends]
    module = Notes()
    run = Trainer(accumulate_grad_batches=2)
    run.fit(module, loader(12, 4), loader(8, 4))
    assert [name for name, _, _ in module.notes] == expected
    for name, training, grad in module.notes:
        assert training == grad == ("validation" not in name)
    module.notes.clear()
    run.test(module, loader(4, 4))
    run.predict(module, loader(4, 4))
    stages = [[*begins, *evaluation(name, 1), *ends] for name in ("test", "predict")]
    assert module.notes == [(name, name in expected, name in expected) for names in stages for name in names]


def test_no_hook_is_left_out_in_processes_that_are_started() -> None:
    """Rank 0 of two has as many batches as one process has of half the data."""
    notes: list[Any] = []
    for ranks in (1, 2):
        brings = Brings()
        run = Trainer(devices=ranks, accelerator="cpu", callbacks=brings)
        fitted, predicted = Notes(), Notes()
        run.fit(fitted, loader(12 * ranks, 4), loader(8 * ranks, 4))
        of_fit = brings.notes
        run.predict(predicted, loader(4 * ranks, 4))
        here = [[], []] if ranks == 1 else [fitted.notes, predicted.notes]
        notes.append([of_fit + here[0], brings.notes + here[1]])
    assert notes[0] == notes[1]
    assert {"prepare_data", "setup", "on_train_start", "teardown"} < {name for name, _, _ in notes[1][0]}
    assert [name for name, _, _ in notes[1][0][-4:]] == ["results_to_return", "teardown", *HOME]


class SetsUp(Classifier):
    """Gets its last layer when it is set up."""

    prepared = False

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        torch.manual_seed(1)
        self.body.append(torch.nn.Linear(3, 3))


def sets_up(rank: int, ranks: int) -> Any:
    module = SetsUp()
    run = trainer(max_epochs=2)
    run.fit(module, loader(20, 24 // ranks))
    return flat_state(module.state_dict()), module.prepared


def test_parts_that_setup_adds_are_trained(pool: Pool) -> None:
    """Of three ranks, the last has no data, and the first prepares it."""
    expected, _ = sets_up(0, 1)
    assert any("body.4." in name for name in expected)
    for rank, (state, prepared) in enumerate(pool.run(sets_up, 2, ranks=3)):
        assert_same(state, expected, TOLERANCE)
        assert prepared == (rank == 0)


class TearsDown(Callback):
    def __init__(self) -> None:
        self.stages: list[str] = []

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        self.stages.append(f"set up {stage}")
        raise KeyError(stage)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self.stages.append(f"torn down {stage}")


def test_teardown_follows_a_setup_that_raised() -> None:
    called = TearsDown()
    with pytest.raises(KeyError, match="validate"):
        Trainer(callbacks=called).validate(Classifier(), loader())
    assert called.stages == ["set up validate", "torn down validate"]


class Clamps(Classifier):
    """Changes gradients in a hook, and logs there."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.log("largest", max(gradient.abs().max().item() for gradient in gradients))
        for gradient in gradients:
            gradient.clamp_(-0.01, 0.01)


class ManualClamps(Clamps):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()


class ClampsFromOutside(Callback):
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: torch.optim.Optimizer) -> None:
        Clamps.on_before_optimizer_step(module, optimizer)


def clamps(rank: int, kind: Any, ranks: int, strategy: dict[str, Any]) -> Any:
    module = kind(optimizer="sgd")
    run = trainer(strategy=strategy, max_epochs=2, callbacks=[ClampsFromOutside()] if kind is Classifier else [])
    run.fit(module, loader(25, 12 // ranks))  # 25: a step that only the first rank takes part in
    return flat_state(module.state_dict()), run.callback_metrics["largest"]


@pytest.mark.parametrize("kind", [Clamps, ManualClamps, Classifier])
@pytest.mark.parametrize("strategy", [{}, {"shard_optimizers": True}], ids=["", "sharded"])
def test_gradients_changed_in_a_hook(pool: Pool, kind: Any, strategy: dict[str, Any]) -> None:
    expected, largest = clamps(0, kind, 1, {})
    for state, found in pool.run(clamps, kind, 2, strategy, ranks=2):
        assert_same(state, expected, TOLERANCE)
        assert found == pytest.approx(largest, abs=TOLERANCE)


class Outer(torch.optim.Optimizer):
    """Wraps another optimizer, and does not call the constructor of its base, as does timm's Lookahead."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = inner, inner.param_groups
        self.defaults, self.state = inner.defaults, inner.state

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state


class WithOuter(Clamps):
    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        self.outer = getattr(self, "outer", None) or Outer(configured["optimizer"])
        return {"optimizer": self.outer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(self.outer, 0.9)}


class ManualWithOuter(WithOuter, ManualClamps): ...


def clamps_twice(rank: int, kind: Any, ranks: int) -> Any:
    module, run = kind(optimizer="sgd"), trainer(max_epochs=1)
    for _ in range(2):  # the second fit has the same optimizer
        run.fit(module, loader(25, 12 // ranks))
        run.max_epochs = 2
    return flat_state(module.state_dict()), run.callback_metrics["largest"], run.global_step


@pytest.mark.parametrize(("kind", "plain"), [(WithOuter, Clamps), (ManualWithOuter, ManualClamps)])
def test_an_optimizer_whose_base_is_not_constructed(pool: Pool, kind: Any, plain: Any) -> None:
    expected, largest, steps = clamps_twice(0, plain, 1)
    for state, found, counted in [clamps_twice(0, kind, 1), *pool.run(clamps_twice, kind, 2, ranks=2)]:
        assert_same(state, expected, TOLERANCE)
        assert found == pytest.approx(largest, abs=TOLERANCE) and counted == steps == 6


class Frees(Classifier):
    """Saves what its last hook frees."""

    def on_train_start(self) -> None:
        self.extra = torch.ones(2)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["extra"] = self.extra

    def on_train_end(self) -> None:
        del self.extra


def test_the_last_hook_frees_what_a_checkpoint_has(tmp_path: Path) -> None:
    module, run = Frees(), Trainer(devices=2, accelerator="cpu")
    run.fit(module, loader(6))
    run.save_checkpoint(tmp_path / "end.ckpt")
    assert torch.load(tmp_path / "end.ckpt")["extra"].tolist() == [1.0, 1.0]


class Retains(ManualClamps):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = Classifier.training_step(self, batch, batch_idx)
        self.optimizers().zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        self.optimizers().step()


def test_options_of_backward(pool: Pool) -> None:
    expected, _ = clamps(0, Retains, 1, {})
    for state, _ in pool.run(clamps, Retains, 2, {}, ranks=2):
        assert_same(state, expected, TOLERANCE)


class Elsewhere(Classifier):
    def on_fit_start(self) -> None: ...


class Validates(Classifier):
    def val_dataloader(self) -> Any: ...


class Zeros(Classifier):
    def optimizer_zero_grad(self, *args: Any) -> None: ...
    def configure_gradient_clipping(self, *args: Any) -> None: ...
    def training_epoch_end(self, outputs: Any) -> None: ...


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.backward = torch.nn.Linear(1, 1)  # no hook


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (Elsewhere(), r"Elsewhere has hooks .* call: on_fit_start\..* such as on_train_start, and"),
        (Zeros(), "call: configure_gradient_clipping, optimizer_zero_grad, training_epoch_end"),
        (Validates(), "call: val_dataloader"),
    ],
)
def test_what_would_never_be_called(module: TrainModule, text: str) -> None:
    """Told before any process starts."""
    with pytest.raises(TypeError, match=text):
        Trainer(devices=2).fit(module, loader())


def test_a_submodule_with_the_name_of_a_hook() -> None:
    Trainer().fit(ByHand(), loader(4), loader(4))


class Lightnings(Callback):
    def on_fit_start(self, trainer: Any, module: Any) -> None: ...

    def results_to_return(self) -> Any: ...


def test_callbacks_with_other_hooks() -> None:
    with pytest.raises(TypeError, match=r"Lightnings has hooks .*: on_fit_start, results_to_return\. Move"):
        Trainer(callbacks=Lightnings())
