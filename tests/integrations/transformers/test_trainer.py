"""Trainers on uneven streams, compared with one process on the same batches."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from tests.ending import Ending, assert_blamed
from tests.harness import Pool
from tests.integrations.ranks import launched, shard
from tests.integrations.transformers.lm import (
    RANKS,
    ROWS,
    alone,
    collated,
    evaluation_loss,
    llama,
    points,
    regression,
    sentences,
)
from tests.integrations.transformers.training import STEPS, TO_EVALUATE, logged, number_of_rows, parameters, trainer_of
from tests.integrations.transformers.versions import ITS_LOOP_IS_ONE_METHOD, PRECISION
from tests.training import assert_same

pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("kind", ["tokens", "samples"])
def test_it_trains_exactly(pool: Pool, kind: str, accumulate: int) -> None:
    compare(pool, kind, accumulate, False)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_sharded_models(pool: Pool, accumulate: int) -> None:
    compare(pool, "tokens", accumulate, True)


def compare(pool: Pool, kind: str, accumulate: int, fsdp: bool) -> None:
    model, samples = (llama(), sentences) if kind == "tokens" else (regression(), points)
    steps = STEPS[accumulate]
    expected, losses, _ = alone(model, samples, accumulate, steps)
    for state, told, made in pool.run(train, kind, accumulate, steps, fsdp, ranks=RANKS, timeout=40):
        assert made == steps
        assert_same(state, expected, 1e-5)
        assert told == pytest.approx(losses, abs=PRECISION)


def train(rank: int, kind: str, accumulate: int, steps: int, fsdp: bool) -> tuple[Any, ...]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        more = {"gradient_accumulation_steps": accumulate, "max_steps": steps}
        trainer = trainer_of(rank, kind, folder, **more)
        if fsdp:
            shard(2)
            trainer.is_fsdp_enabled = True
        trainer.train()
        assert trainer.join_report is not None
        assert isinstance(trainer.model_wrapped, FSDPModule) is fsdp
        return parameters(trainer), logged(trainer, "loss"), trainer.state.global_step


def evaluate(rank: int, options: dict[str, Any]) -> tuple[Any, ...]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "tokens", folder, max_steps=4, eval_strategy="steps", eval_steps=1, **options)
        before = trainer.evaluate()
        trainer.train()
        predicted = trainer.predict(trainer.eval_dataset)
        rows = number_of_rows(predicted)["rows"]
        return before["eval_loss"], logged(trainer, "eval_loss"), before["eval_rows"], rows


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"eval_use_gather_object": True, "eval_do_concat_batches": False},
        {"eval_use_gather_object": True, "eval_accumulation_steps": 2},
    ],
    ids=["", "objects by step", "objects"],
)
def test_evaluation_on_uneven_streams(pool: Pool, options: dict[str, Any]) -> None:
    batches = [collated(sentences(0, 0, step)) for step in range(TO_EVALUATE[0][0])]
    _, _, expected = alone(llama(), sentences, 1, 4, evaluated=batches)
    with torch.no_grad():
        first = sum(evaluation_loss(llama().eval(), batch) for batch in batches) / len(batches)
    for before, during, rows, predicted in pool.run(evaluate, options, ranks=RANKS, timeout=40):
        assert before == pytest.approx(first, abs=1e-5)
        assert during[-4:] == pytest.approx(expected, abs=1e-5)
        assert rows == predicted == ROWS * len(batches)


def stop_early(rank: int, folder: str) -> tuple[Any, ...]:
    from transformers import EarlyStoppingCallback

    each = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    with launched():
        # The rate is so high that the loss soon grows; only one rank has data to evaluate.
        more = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
        stop = EarlyStoppingCallback(early_stopping_patience=2)
        trainer = trainer_of(rank, "tokens", folder, callbacks=[stop], **each, **more)
        trainer.train()
        state = trainer.state
        return parameters(trainer), state.global_step, logged(trainer, "eval_loss"), trainer.evaluate()["eval_loss"]


def test_early_stopping_and_the_best_model(pool: Pool, tmp_path: Path) -> None:
    (state, steps, losses, best), other = pool.run(stop_early, str(tmp_path), ranks=RANKS, timeout=40)
    assert 3 <= steps == len(losses) < STEPS[1] and steps == losses.index(min(losses)) + 3
    assert best == min(losses)
    assert_same(other[0], state, 0)
    assert other[1:] == (steps, losses, best)


def train_and_stop(rank: int, folder: str, at: int) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop = state.global_step == at

    with launched():
        more = {"gradient_accumulation_steps": 2, "max_steps": 6, "save_strategy": "steps", "save_steps": at}
        trainer_of(rank, "tokens", folder, callbacks=[Stop()], **more).train()


def stop_inside(rank: int) -> int:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop = state.global_step == 1

    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "tokens", folder, callbacks=[Stop()], gradient_accumulation_steps=3)
        trainer.train()
        return trainer.state.global_step


def test_a_training_that_stops_in_the_middle_of_a_window(pool: Pool) -> None:
    assert pool.run(stop_inside, ranks=RANKS, timeout=40) == [1, 1]


def resume(rank: int, folder: str, at: int) -> tuple[Any, ...]:
    with launched():
        trainer = trainer_of(rank, "tokens", folder, gradient_accumulation_steps=2, max_steps=6)
        checkpoint = str(Path(folder) / f"checkpoint-{at}")
        if ITS_LOOP_IS_ONE_METHOD:
            with pytest.raises(
                ValueError, match=r"not find the epoch of a stream.* transformers 5\.3 or newer\. \[J763\]"
            ):
                trainer.train(resume_from_checkpoint=checkpoint)
            return ()
        trainer.train(resume_from_checkpoint=checkpoint)
        return parameters(trainer), logged(trainer, "loss")


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_resuming_in_the_middle_of_an_epoch(pool: Pool, tmp_path: Path, at: int) -> None:
    expected, losses, _ = alone(llama(), sentences, 2, 6)
    pool.run(train_and_stop, str(tmp_path), at, ranks=RANKS, timeout=40)
    for found in pool.run(resume, str(tmp_path), at, ranks=RANKS, timeout=40):
        if found:
            assert_same(found[0], expected, 1e-5)
            assert found[1] == pytest.approx(losses, abs=PRECISION)


def failing(rank: int) -> str:
    from transformers import TrainerCallback

    class Fail(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if rank == 1 and state.global_step == 2:
                raise KeyError("in a callback")

    with launched(), tempfile.TemporaryDirectory() as folder:
        try:
            trainer_of(rank, "tokens", folder, callbacks=[Fail()]).train()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "fine"


def test_an_exception_in_the_loop_is_told(ending: Ending) -> None:
    assert_blamed(ending.run(failing, ranks=RANKS), 1, "KeyError: 'in a callback'")


def changes_at_the_end(rank: int) -> bool:
    """Once the training is over, rank 0 changes its model alone, as code that exports a model does."""
    from transformers import TrainerCallback

    reports: list[Any] = []

    class Merges(TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            reports.append(trainer.join_report)
            with torch.no_grad():
                next(named["model"].parameters()).mul_(2 - min(rank, 1))

    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "samples", folder, max_steps=2)
        trainer.add_callback(Merges())
        trainer.train()
    return reports == [trainer.join_report] and reports[0] is not None


def test_the_end_of_a_training_is_after_its_last_block(pool: Pool) -> None:
    assert pool.run(changes_at_the_end, ranks=RANKS, timeout=40) == [True] * RANKS
