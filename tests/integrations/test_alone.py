"""A framework that takes each process of a launcher for its only one says so. The first test runs everywhere."""

from __future__ import annotations

import os
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from joinables.integrations import warn_if_alone
from tests.ending import Ending
from tests.integrations.ranks import launched

LAUNCHED = {"RANK": "0", "WORLD_SIZE": "2"}
TOLD = "num_processes=1, but WORLD_SIZE=2: each process trains a model of its own"


@pytest.mark.parametrize(
    ("processes", "variables"), [(2, LAUNCHED), (1, {}), (1, {"WORLD_SIZE": "2"}), (1, {**LAUNCHED, "WORLD_SIZE": "1"})]
)
def test_only_who_is_alone_is_warned(
    monkeypatch: pytest.MonkeyPatch, processes: int, variables: dict[str, str]
) -> None:
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    warn_if_alone("Somebody", processes, "Do not.")  # warnings are errors
    monkeypatch.setattr(os, "environ", LAUNCHED)
    with pytest.warns(UserWarning, match=f"Somebody trains in {TOLD}. Do this.") as caught:
        warn_if_alone("Somebody", 1, "Do this.")
    assert len(caught) == 1


def test_accelerate_under_a_launcher_without_gpus() -> None:
    library = pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    if tuple(map(int, library.__version__.split(".")[:2])) < (1, 13):
        pytest.skip("Accelerate 1.12 and older train together in the processes of a launcher, on CPUs too")
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched(**LAUNCHED, ACCELERATE_USE_CPU="false"), pytest.warns(UserWarning, match=f"{TOLD}.*cpu=True"):
        join_uneven_inputs(library.Accelerator(), [])


def test_transformers_in_one_process() -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
    from joinables.integrations.transformers import JoinTrainerMixin

    plain = SimpleNamespace(_inner_training_loop=lambda: None)
    trainer: Any = SimpleNamespace(_is_distributed=False, args=SimpleNamespace(world_size=1), _plain=plain)
    with launched(**LAUNCHED), pytest.warns(UserWarning, match=f"JoinTrainer trains in {TOLD}.*use_cpu=True"):
        JoinTrainerMixin._inner_training_loop(trainer)


def fit_alone(rank: int) -> list[str]:
    from tests.integrations.lightning.training import Case, JoinStrategy, Module, loader_of, pl, quiet

    quiet(rank)
    os.environ.update(LAUNCHED, LOCAL_RANK="0")
    quietly: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=JoinStrategy(), max_epochs=1, **quietly)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Module(Case()), loader_of("stream", rank, 2))
    return [str(each.message) for each in caught]


def test_lightning_in_one_process(ending: Ending) -> None:
    pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")
    (told,) = ending.run(fit_alone, ranks=1, group=False)
    assert sum(f"JoinStrategy trains in {TOLD}" in text for text in told) == 1
