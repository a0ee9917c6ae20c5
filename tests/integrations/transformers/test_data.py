"""What ranks read with a JoinTrainer, how long an epoch is, and what is refused."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from joinables.modules import replaced
from tests.harness import Pool
from tests.integrations.ranks import launched
from tests.integrations.transformers.lm import (
    RANKS,
    ROWS,
    SizedStream,
    Stream,
    alone,
    collated,
    llama,
    points,
    sentences,
)
from tests.integrations.transformers.training import STEPS, logged, parameters, trainer_of
from tests.integrations.transformers.versions import ITS_LOOP_IS_ONE_METHOD, PRECISION
from tests.training import assert_same

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")


def read(rank: int) -> tuple[list[float], int]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        data = [sample for step in range(3) for sample in points(0, 0, step)][:-1]
        more = {"max_steps": -1, "num_train_epochs": 2}
        trainer = trainer_of(rank, "samples", folder, train_dataset=data, **more)
        found = [float(label) for batch in trainer.get_train_dataloader() for label in batch["labels"]]
        trainer.train()
        return found, trainer.state.global_step


def test_a_map_style_data_set(pool: Pool) -> None:
    samples = sorted(float(sample["labels"]) for step in range(3) for sample in points(0, 0, step))
    last = float(points(0, 0, 2)[-1]["labels"])
    results = pool.run(read, ranks=RANKS, timeout=40)
    assert sorted(label for found, _ in results for label in found) == [each for each in samples if each != last]
    assert [steps for _, steps in results] == [4, 4]


def train_sized(rank: int, counts: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        stream = SizedStream(sentences, rank, counts)
        more = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 2}
        trainer = trainer_of(rank, "tokens", folder, train_dataset=stream, **more)
        trainer.train()
        return parameters(trainer), logged(trainer, "loss"), trainer.state.epoch


def test_streams_that_have_a_length(pool: Pool) -> None:
    expected, losses, _ = alone(llama(), sentences, 2, 3)
    for state, told, epoch in pool.run(train_sized, ((5, 2),), ranks=RANKS, timeout=40):
        assert_same(state, expected, 1e-5)
        assert told == pytest.approx(losses, abs=PRECISION)
        assert epoch == 1


def train_mixed(rank: int) -> int:
    stream = (SizedStream if rank else Stream)(sentences, rank)
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "tokens", folder, train_dataset=stream, max_steps=2)
        trainer.train()
        return trainer.state.global_step


def test_one_stream_without_a_length_makes_all_have_none(pool: Pool) -> None:
    assert pool.run(train_mixed, ranks=RANKS, timeout=40) == [2] * RANKS


def train_on_a_list(rank: int) -> int:
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(rank, "samples", folder)
        loader = list(trainer.get_train_dataloader())
        with replaced(trainer, "get_train_dataloader", lambda: loader):
            with pytest.raises(TypeError, match=r"An object of type list cannot get __len__ .* \[J764\]"):
                trainer.train()
            loader = DataLoader(trainer.train_dataset, ROWS, collate_fn=collated)
            kind = type(loader)
            trainer.train()
        assert type(loader) is kind
        return trainer.state.global_step


def test_loaders_of_a_user(pool: Pool) -> None:
    """Their length is that of the longest one, where they can have one, and only in the training."""
    assert pool.run(train_on_a_list, ranks=RANKS, timeout=40) == [STEPS[1]] * RANKS


def refused(rank: int) -> list[str]:
    told: list[str] = []
    with launched(), tempfile.TemporaryDirectory() as folder:
        for more in (
            {"model": DistributedDataParallel(llama())},
            *([{"include_num_input_tokens_seen": "all"}] if ITS_LOOP_IS_ONE_METHOD else []),
        ):
            try:
                trainer_of(rank, "tokens", folder, **more).train()
            except ValueError as error:
                told.append(str(error))
    return told


def test_what_is_refused(pool: Pool) -> None:
    starts = [
        "The module is wrapped in DistributedDataParallel twice",
        *(["include_num_input_tokens_seen would count"] if ITS_LOOP_IS_ONE_METHOD else []),
    ]
    for told in pool.run(refused, ranks=RANKS, timeout=40):
        assert [text[: len(start)] for text, start in zip(told, starts, strict=True)] == starts


def test_classes_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from joinables.integrations.transformers import JoinTrainer, JoinTrainerMixin

    class Tuner(transformers.Trainer):
        pass

    for bases in ((transformers.Trainer, JoinTrainerMixin), (JoinTrainerMixin,), (Tuner, JoinTrainer)):
        with pytest.raises(TypeError, match="Wrong does not list JoinTrainerMixin before"):
            type("Wrong", bases, {})
    for bases in ((JoinTrainerMixin, Tuner), (JoinTrainer, transformers.Trainer), (JoinTrainer,)):
        type("Right", bases, {})
    monkeypatch.delattr(transformers.Trainer, "get_batch_samples")
    with pytest.raises(ImportError, match=r"has no get_batch_samples, which JoinTrainer needs\. Install a version"):
        type("Old", (JoinTrainerMixin, transformers.Trainer), {})


def test_one_process() -> None:
    with launched(), tempfile.TemporaryDirectory() as folder:
        stream = Stream(sentences, 0, ((3,),))
        trainer = trainer_of(0, "tokens", folder, train_dataset=stream, max_steps=3)
        trainer.train()
        assert trainer.state.global_step == 3
        assert trainer.join_report is None
        assert len(trainer.predict(trainer.eval_dataset).predictions) == 3 * ROWS
