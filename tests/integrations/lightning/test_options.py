"""Options of Lightning's ``Trainer`` and ``DDPStrategy``: they are exact, or cannot hold and are refused by name."""

from __future__ import annotations

import importlib.metadata
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")

import torch

from joinables.integrations.lightning import JoinStrategy
from tests.ending import Ending
from tests.integrations.lightning.training import Case, Module, in_one_process, loader_of, quiet, trainer_of

CASE = Case(counts=(4, 0), epochs=2)


def fit(rank: int, options: dict[str, Any]) -> list[torch.Tensor]:
    quiet(rank)
    module = Module(CASE)
    if named := options.pop("named", None):
        options["strategy"] = JoinStrategy(**named)
    trainer_of(CASE, **options).fit(module, *(loader_of("stream", rank, count) for count in (CASE.counts[rank], rank)))
    return module.state()


@pytest.mark.parametrize(
    "options",
    [
        {"max_time": "00:01:00:00", "min_steps": 1, "min_epochs": 1},
        {"num_sanity_val_steps": 2, "reload_dataloaders_every_n_epochs": 1, "check_val_every_n_epoch": 2},
        {"deterministic": True, "detect_anomaly": True, "inference_mode": False, "profiler": "simple"},
        {"barebones": True},
        {"named": {"static_graph": True, "gradient_as_bucket_view": True, "model_averaging_period": 2}},
        {"named": {"find_unused_parameters": True, "broadcast_buffers": False, "timeout": timedelta(minutes=2)}},
    ],
    ids=lambda options: "+".join(options.get("named", options)),
)
def test_options_that_hold(ending: Ending, options: dict[str, Any]) -> None:
    expected = in_one_process(CASE)
    for state in ending.run(fit, options, ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)


def validate_by_the_clock(rank: int) -> None:
    quiet(rank)
    loaders = [loader_of("stream", rank, 3 - 2 * rank) for _ in range(2)]
    with pytest.raises(ValueError, match=r"a time as val_check_interval, .* Pass a number of batches\. \[J886\]"):
        trainer_of(CASE, val_check_interval=timedelta(seconds=1)).fit(Module(CASE), *loaders)
    trainer_of(CASE, val_check_interval=timedelta(seconds=1)).fit(Module(CASE), loaders[0])


def test_validations_by_the_clock_of_each_rank(ending: Ending) -> None:
    if tuple(map(int, importlib.metadata.version("lightning").split(".")[:2])) < (2, 6):
        pytest.skip("Lightning 2.5 takes no time as val_check_interval")
    ending.run(validate_by_the_clock, ranks=2)
