"""Options of ``TrainingArguments``: they are exact, or cannot hold and are refused by name, on several ranks only."""

from __future__ import annotations

import tempfile
from dataclasses import fields
from typing import Any

import pytest

from tests.harness import Pool
from tests.integrations.ranks import launched
from tests.integrations.transformers.lm import RANKS, alone, collated, llama, points, sentences
from tests.integrations.transformers.training import STEPS, logged, parameters, trainer_of
from tests.integrations.transformers.versions import PRECISION
from tests.training import assert_same

pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")

import transformers

from joinables.integrations.transformers import REFUSED

UNDERFLOW = "underflow_overflow"
NAMES = {field.name for field in fields(transformers.TrainingArguments)}
"""Options in the installed version."""


def chosen(option: str) -> dict[str, Any]:
    """The arguments with an option of the table; without it in a version that does not have it."""
    name, _, value = option.partition("=")
    if name in NAMES:
        return {name: value == "True"}
    return {"accelerator_config": {name: value == "True"}} if name.endswith("_batches") else {}


def train(rank: int, options: dict[str, Any]) -> str:
    with launched(), tempfile.TemporaryDirectory() as folder:
        try:
            trainer = trainer_of(rank, "samples", folder, max_steps=2, **options)
            trainer.train()
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("option", REFUSED)
def test_an_option_that_cannot_hold(pool: Pool, option: str) -> None:
    options = chosen(option)
    if not options:
        pytest.skip(f"Transformers {transformers.__version__} does not have {option}")
    place = "accelerator_config" if "accelerator_config" in options else "TrainingArguments"
    expected = f"With {option}, {REFUSED[option]}. Remove it from {place}. [J121]"
    assert pool.run(train, options, ranks=RANKS, timeout=60) == [expected] * RANKS
    assert pool.run(train, options, ranks=1, timeout=60) == [""]


def train_with(rank: int, options: dict[str, Any], accumulate: int) -> tuple[Any, ...]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(
            rank, "tokens", folder, max_steps=STEPS[accumulate], gradient_accumulation_steps=accumulate, **options
        )
        trainer.train()
        return parameters(trainer), logged(trainer, "loss")


@pytest.mark.parametrize(
    "options",
    [
        {"ddp_static_graph": True, "ddp_bucket_cap_mb": 1},
        {"ddp_find_unused_parameters": True, "ddp_broadcast_buffers": False},
        {"gradient_checkpointing": True, "logging_first_step": True, "torch_empty_cache_steps": 1},
        {"dataloader_drop_last": True, "full_determinism": True, "skip_memory_metrics": False, "debug": UNDERFLOW},
    ],
    ids="+".join,
)
def test_options_that_hold(pool: Pool, options: dict[str, Any]) -> None:
    options = {name: value for name, value in options.items() if name in NAMES}
    accumulate = 1 if "ddp_static_graph" in options else 2  # DDP itself fails if the first backward is under no_sync
    expected, losses, _ = alone(llama(), sentences, accumulate, STEPS[accumulate])
    for state, told in pool.run(train_with, options, accumulate, ranks=RANKS, timeout=60):
        assert_same(state, expected, 1e-5)
        assert told == pytest.approx(losses, abs=PRECISION)


def read(rank: int) -> list[float]:
    with launched(), tempfile.TemporaryDirectory() as folder:
        data = [sample for step in range(3) for sample in points(0, 0, step)][:-1]
        more: dict[str, Any] = {"max_steps": -1, "accelerator_config": {"split_batches": True}}
        trainer = trainer_of(rank, "samples", folder, train_dataset=data, num_train_epochs=1, **more)
        trainer.train()
        return [float(label) for batch in trainer.get_train_dataloader() for label in batch["labels"]]


def test_batches_that_are_split(pool: Pool) -> None:
    """Of a map-style data set, whose batches all ranks have, each trains on its part."""
    samples = sorted(float(label) for step in range(3) for label in collated(points(0, 0, step))["labels"])
    last = float(points(0, 0, 2)[-1]["labels"])
    results = pool.run(read, ranks=RANKS, timeout=60)
    assert sorted(label for found in results for label in found) == [each for each in samples if each != last]
