"""DeepSpeed, ZeRO 0 to 3: the block lists nothing, and the engine counts micro-batches and divides losses itself."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from typing_extensions import override

import join
from join import Join
from tests.ending import Ending
from tests.engines.table import Cell, cells_of
from tests.engines.training import Engine, Feed, adam, alone, build, train
from tests.scripts import as_script
from tests.training import assert_same, flat_state

TOLERANCE = 2e-6
"""ZeRO keeps its parameters in float32."""
STAGES = {f"ZeRO {stage}": stage for stage in range(4)}

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: make test-engines"
)


class DeepSpeed(Engine):
    def __init__(self, rank: int, cell: Cell, seed: int) -> None:
        import deepspeed  # pyright: ignore[reportMissingImports]

        super().__init__(rank, cell, seed)
        deepspeed.init_distributed(dist_backend="gloo")
        net = build(seed).float()
        config = {
            "train_micro_batch_size_per_gpu": 1,  # any number: losses are scaled by the samples that there are
            "gradient_clipping": 0.0,  # 1.0 unless it is given
            "gradient_accumulation_steps": cell.window,
            "zero_optimization": {"stage": STAGES[cell.engine]},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        self.engine, *_ = deepspeed.initialize(model=net, optimizer=adam(net), config=config)
        self.listed = [self.engine] if cell.is_plain else []
        self.options: Any = {} if self.listed else {"process_group": None}

    @override
    def train(self, feed: Feed) -> None:
        window = self.cell.window
        with Join(self.listed, divide_by_initial_world_size=False, loss_divided_by=window, **self.options) as block:
            for x, y in feed.steps(block, fill_window=True):
                loss = mse_loss(self.engine(x.float()), y.float())
                self.engine.backward(block.scale(loss))
                self.engine.step()

    @override
    def save(self) -> Any:
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        self.engine.save_checkpoint(folder[0])
        return folder[0]

    @override
    def load(self, checkpoint: Any) -> None:
        self.engine.load_checkpoint(checkpoint)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(checkpoint)

    @override
    def state(self) -> dict[str, torch.Tensor]:
        import deepspeed  # pyright: ignore[reportMissingImports]

        parameters = dict(self.engine.module.named_parameters())
        with deepspeed.zero.GatheredParameters(list(parameters.values())):
            return flat_state({name: each.detach().clone() for name, each in parameters.items()})


def prepare(rank: int) -> None:
    """Before DeepSpeed is imported; its extension is compiled by ninja, which is beside the interpreter."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(rank), "LOCAL_SIZE": "3"}
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


@needs_deepspeed
@pytest.mark.timeout(400)
@pytest.mark.parametrize("cell", cells_of(*STAGES), ids=str)
def test_deepspeed(ending: Ending, cell: Cell) -> None:
    ends = ending.ends(train, DeepSpeed, cell, prepare=prepare, limit=300)
    if cell.outcome != "yes":
        assert all(f"[{cell.outcome}]" in end.error for end in ends), [end.text for end in ends]
        return
    assert [end.code for end in ends] == [0] * len(ends), [end.text for end in ends]
    expected = {name: value for name, value in alone(cell).items() if name.startswith("0.")}
    for end in ends:
        assert_same(end.result, expected, TOLERANCE)


RECIPE = Path(join.__file__).parent.parent / "recipes" / "deepspeed_zero.py"


@needs_deepspeed
def test_the_recipe() -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RECIPE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "differ from those of one process by" in done.stdout


def without_deepspeed(rank: int) -> None:
    importlib.util.find_spec = lambda *_: None  # type: ignore[assignment]
    as_script(rank, str(RECIPE.parent), RECIPE.name)


def test_a_missing_extra_is_a_sentence(ending: Ending) -> None:
    (end,) = ending.ends(without_deepspeed, ranks=1, group=False)
    assert (end.code, end.stderr) == (1, "This recipe needs DeepSpeed: pip install 'joinables[deepspeed]'\n")
