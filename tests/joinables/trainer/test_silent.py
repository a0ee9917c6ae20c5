"""Faults that would train or report something else without a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from joinables.trainer import Callback, DDPStrategy, ModelCheckpoint, Strategy, Trainer, TrainModule
from tests.harness import Pool
from tests.joinables.trainer.modules import Classifier, loader
from tests.joinables.trainer.ranks import trainer
from tests.training import TOLERANCE, assert_same, flat_state


class Part(TrainModule):
    nothing = None

    def __init__(self, name: str) -> None:
        super().__init__()
        setattr(self, name, torch.nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["optimizers", "log", "training_step", "nothing", "half"])
def test_a_part_that_its_class_would_hide_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"Part gets a part called '{name}'.*\[J872\]"):
        Part(name)


@pytest.mark.parametrize("name", ["encoder", "reduce", "all_gather"])
def test_a_part_with_another_name_is_kept(name: str) -> None:
    assert isinstance(getattr(Part(name), name), torch.nn.Linear)


class Average(Classifier):
    """Brings weights of its own in a checkpoint, and loads them in place of the others."""

    loads = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["average"] = {name: torch.full_like(value, 7) for name, value in self.state_dict().items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["module"], self.loads = checkpoint.pop("average"), self.loads + 1


class Forgets(Classifier):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        del checkpoint["optimizers"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_fit_without_the_optimizers_of_the_first(ranks: int) -> None:
    run, module = Trainer(devices=ranks, accelerator="cpu"), Forgets()
    run.fit(module, loader(12))
    run.max_epochs = 2
    with pytest.raises(ValueError, match=r"KeyError\('optimizers'\).*\[J251\]"):
        run.fit(module, loader(12))


class Looks(Callback):
    found: Any = None

    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        self.found = {name: value.clone() for name, value in module.state_dict().items()}

    def on_load_checkpoint(self, trainer: Any, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["module"] = {name: value + 1 for name, value in checkpoint["module"].items()}


@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_hooks_replace_entries_of_a_checkpoint(tmp_path: Path, stage: str) -> None:
    run, trained = Trainer(), Average()  # a trainer does not keep the module of its last fit
    run.fit(trained, loader(12))
    run.save_checkpoint(tmp_path / "saved.ckpt")
    module, looks = Average(), Looks()
    getattr(Trainer(max_epochs=2, callbacks=looks), stage)(module, loader(12), ckpt_path=tmp_path / "saved.ckpt")
    assert module.loads == 1
    found = looks.found if stage == "fit" else module.state_dict()
    assert all((value == 8).all() for value in found.values())


def test_fits_in_one_folder_keep_their_files(tmp_path: Path) -> None:
    keepers: list[ModelCheckpoint] = []
    for seed in range(3):
        keeper, module = ModelCheckpoint(tmp_path, save_last=True), Classifier()
        torch.nn.init.constant_(module.body[0].weight, seed)  # pyright: ignore[reportArgumentType]
        Trainer(callbacks=keeper, max_epochs=2).fit(module, loader(12))
        keepers.append(keeper)
    names = [Path(keeper.best_model_path).name for keeper in keepers]
    assert len(set(names)) == 3
    assert {path.name for path in tmp_path.iterdir()} == {*names, "last.ckpt"}
    weights = [torch.load(keeper.best_model_path)["module"]["body.0.weight"].mean().item() for keeper in keepers]
    assert [round(weight) for weight in weights] == [0, 1, 2]


class Weighs(Classifier):
    """Drops some of the batches."""

    def __init__(self, dropped: set[int]) -> None:
        super().__init__(optimizer="sgd", scheduler="epoch")
        self.dropped = dropped

    def batch_size(self, batch: Any) -> int | None:
        return 0 if int(batch[2][0]) // 4 in self.dropped else None

    def shared_step(self, batch: Any, stage: str) -> torch.Tensor:
        return super().shared_step(batch[:2], stage)


def weighs(rank: int, dropped: set[int], accumulated: int) -> Any:
    x, y = loader(26, 26).dataset[:26]
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y, torch.arange(26)), 4)
    module = Weighs(dropped)
    trainer(accumulate_grad_batches=accumulated).fit(module, data)
    return flat_state(module.state_dict())


@pytest.mark.parametrize("dropped", [set(range(7)), {0, 1, 5}, {6}], ids=str)
def test_a_batch_without_samples_counts_for_nothing(pool: Pool, dropped: set[int]) -> None:
    """Seven batches, two in a step: on one rank, and on two."""
    expected = weighs(0, dropped, 2)
    if len(dropped) == 7:
        assert_same(expected, flat_state(Classifier().state_dict()), 0.0)
        assert_same(weighs(0, dropped, 1), expected, 0.0)
    for state in pool.run(weighs, dropped, 1, ranks=2):
        assert_same(state, expected, TOLERANCE)


class LogsRate(Classifier):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.log("lr", optimizer.param_groups[0]["lr"])


def logs_rate(rank: int, size: int) -> float:
    run = trainer(accumulate_grad_batches=3)
    run.fit(LogsRate(scheduler="step"), loader(34, size))
    return run.callback_metrics["lr"]


def test_values_of_an_optimizer_step_weigh_its_samples(pool: Pool) -> None:
    assert pool.run(logs_rate, 4, ranks=2) == [pytest.approx(logs_rate(0, 8), abs=1e-12)] * 2


def test_trainers_that_share_a_strategy() -> None:
    class Own:
        def save_checkpoint(self, *_: Any) -> None: ...
        def load_checkpoint(self, *_: Any) -> None: ...
        def remove_checkpoint(self, *_: Any) -> None: ...

    shared, own = DDPStrategy("fork"), Own()
    first = Trainer(devices=2, strategy=shared, checkpoint_io=own)  # pyright: ignore
    Trainer(devices=2, strategy=shared)
    first.validate(Classifier(), loader(12))
    assert first.checkpoint_io is own
    one = Strategy()
    assert Trainer(strategy=one).checkpoint_io is not Trainer(strategy=one).checkpoint_io


class Stops(Callback):
    """Raises in some hooks, and notes all last ones."""

    def __init__(self, key: str, *where: str) -> None:
        self.key, self.where, self.called = key, where, list[str]()

    @property
    def state_key(self) -> str:
        return self.key

    def reach(self, where: str) -> None:
        self.called.append(where)
        if where in self.where:
            raise LookupError(f"{self.key} in {where}")

    def on_train_start(self, trainer: Any, module: TrainModule) -> None:
        self.reach("on_train_start")

    def teardown(self, trainer: Any, module: TrainModule, stage: str) -> None:
        self.reach("teardown")


class TornDown(Classifier):
    is_torn_down = False

    def teardown(self, stage: str) -> None:
        self.is_torn_down = True


@pytest.mark.parametrize("first", ["on_train_start", "teardown"])
def test_the_first_exception_is_raised_and_all_last_hooks_are_called(tmp_path: Path, first: str) -> None:
    later = ["teardown"] if first == "on_train_start" else []
    one, other, module = Stops("one", first, *later), Stops("other", *later), TornDown()
    with pytest.raises(LookupError, match=f"one in {first}"):
        Trainer(callbacks=[one, other], default_root_dir=tmp_path).fit(module, loader(4))
    assert one.called == ["on_train_start", "teardown"]
    assert other.called == [*["on_train_start"] * (first != "on_train_start"), "teardown"]
    assert module.is_torn_down


class Draws(Classifier):
    def on_train_end(self) -> None:
        self.drawn = self.trainer.strategy.all_gather(torch.rand(2)).tolist()

    def results_to_return(self) -> Any:
        return self.drawn

    def take_results(self, results: Any) -> None:
        self.drawn = results


def test_ranks_draw_different_numbers() -> None:
    """Rank 0 draws what one process draws."""
    drawn: list[Any] = []
    for ranks in (1, 3, 3):
        torch.manual_seed(5)
        module = Draws()
        torch.manual_seed(5)
        Trainer(devices=ranks, accelerator="cpu").fit(module, loader(12 * ranks, 12))
        drawn.append(module.drawn)
    assert drawn[1] == drawn[2] and drawn[1][0] == drawn[0][0]
    assert len({tuple(each) for each in drawn[1]}) == 3
