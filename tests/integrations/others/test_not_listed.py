"""The examples of the page about frameworks that are not listed, where these can be imported."""

from __future__ import annotations

import multiprocessing
import operator
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, IterableDataset

from join import Join
from tests.ending import Ending
from tests.examples import examples_of
from tests.integrations.ranks import imported
from tests.training import assert_same

COUNTS, EPOCHS = (3, 0), 2


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def data(rank: int) -> list[torch.Tensor]:
    return [batch(rank, step) for step in range(COUNTS[rank])]


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1)


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out - 1).square().mean()


def alone(accumulate: int) -> dict[str, torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(EPOCHS):
        for start in range(0, max(COUNTS), accumulate):
            batches = [batch for rank in range(len(COUNTS)) for batch in data(rank)[start : start + accumulate]]
            optimizer.zero_grad()
            (sum(loss_of(model(batch)) for batch in batches) / torch.tensor(len(batches))).backward()
            optimizer.step()
    return dict(model.state_dict())


def example(name: str, names: dict[str, Any]) -> Any:
    [code] = [each.code for each in examples_of("frameworks/other.md") if f"class {name}" in each.code]
    exec(code, names)
    return names[name]


class Batches(Dataset[Any]):
    """Map-style, since a runner asks its loader for a sampler."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = [{"inputs": each} for each in batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]


class Stream(IterableDataset[Any]):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def quiet() -> None:
    warnings.simplefilter("ignore")  # theirs


def run(rank: int, folder: str) -> dict[str, torch.Tensor]:
    quiet()
    base = imported("mmengine.model")

    class Model(base.BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, inputs: torch.Tensor, mode: str = "loss") -> dict[str, torch.Tensor]:
            return {"loss": loss_of(self.net(inputs))}

    hook = example("JoinHook", {"Hook": imported("mmengine.hooks").Hook, "Join": Join})
    os.environ["LOCAL_RANK"] = str(rank)
    method = multiprocessing.get_start_method(allow_none=True) or "fork"
    trained = imported("mmengine.runner").Runner(
        env_cfg={"mp_cfg": {"mp_start_method": method}},
        model=base.MMDistributedDataParallel(module=Model()),
        work_dir=folder,
        train_dataloader=DataLoader(Batches(data(rank)), collate_fn=operator.itemgetter(0)),
        train_cfg={"by_epoch": True, "max_epochs": EPOCHS},
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1}},
        custom_hooks=[hook()],
        launcher="pytorch",
        experiment_name="test",
    )
    trained.train()
    return {name.removeprefix("module.net."): each for name, each in trained.model.state_dict().items()}


def test_a_runner_with_a_hook(ending: Ending, tmp_path: Any) -> None:
    pytest.importorskip("mmengine.runner", reason="MMEngine is not installed: pip install mmengine")
    for state in ending.run(run, str(tmp_path), ranks=len(COUNTS)):
        assert_same(state, alone(1), 1e-6)


def brain(rank: int) -> dict[str, torch.Tensor]:
    quiet()
    core = imported("speechbrain.core")

    class Own(core.Brain):
        def compute_forward(self, batch: torch.Tensor, stage: Any) -> torch.Tensor:
            return self.modules.net(batch)

        def compute_objectives(self, predictions: torch.Tensor, batch: Any, stage: Any) -> torch.Tensor:
            return loss_of(predictions)

    kind = example("JoinBrain", {"Brain": Own, "Stage": core.Stage, "Join": Join})
    options = {"device": "cpu", "distributed_launch": False, "noprogressbar": True, "max_grad_norm": 1e9}
    trained = kind({"net": net()}, lambda parameters: torch.optim.SGD(parameters, 0.1), run_opts=options)
    trained.modules["net"] = DistributedDataParallel(trained.modules["net"])  # as its launch with several GPUs does
    trained.fit(range(EPOCHS), DataLoader(Stream(data(rank)), batch_size=None))
    return {name.removeprefix("module."): value for name, value in trained.modules.net.state_dict().items()}


def test_a_brain(ending: Ending) -> None:
    for package in ("torchaudio", "speechbrain"):  # importing them needs a torchaudio for this torch
        pytest.importorskip(package, reason="SpeechBrain cannot be imported", exc_type=Exception)  # pyright: ignore
    for state in ending.run(brain, ranks=len(COUNTS)):
        assert_same(state, alone(1), 1e-6)
