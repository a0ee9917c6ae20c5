"""The code of the guide runs as it stands, on ranks with and without data; all end with the same parameters."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import join
from tests.ending import Ending
from tests.models import FEATURES, TARGETS, assert_same, batch, flat_state
from tests.pool import Pool
from tests.scripts import run_forked
from tests.versions import OWN_BUFFERS

ROOT = Path(join.__file__).parent.parent
COUNTS = 0, 3, 1


def blocks(page: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text().replace("broadcast_buffers", next(iter(OWN_BUFFERS)))
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, TARGETS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](torch.tanh(self.layers[0](x)))


def follow(rank: int, code: str, zero: bool, wrapped: bool) -> list[torch.Tensor]:
    """Run a block; where the parameters end."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net: Any = Net()
    names: dict[str, Any] = {"net": net, "torch": torch, "dist": dist, "Join": join.Join, "epochs": 2}
    names |= {"schedule": lambda step: 0.1 / (1 + step), "device": "cpu"}
    names |= {"loss_fn": nn.functional.mse_loss, "loader": [batch(rank, 0, step) for step in range(COUNTS[rank])]}
    names |= {"DistributedDataParallel": DistributedDataParallel, "validation": [batch(rank, 1, 0)] * (1 + rank)}
    if wrapped:
        names["model"] = model = DistributedDataParallel(net)
        parameters = model.parameters()
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam) if zero else torch.optim.Adam(parameters)
        names["scaler"] = torch.amp.GradScaler("cpu", init_scale=8.0)
        names |= {"optimizer": optimizer, "ema": Net()}
        if "scheduler" in code:
            names["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    exec(code, names)
    found = [parameter.detach() for parameter in names["model"].parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in found]


@pytest.mark.parametrize(
    ("page", "at", "zero", "wrapped"),
    [
        ("block.md", 0, False, False),
        ("block.md", 1, False, True),
        ("block.md", 2, False, False),
        ("block.md", 3, True, True),
        ("weights.md", 0, False, True),
        ("weights.md", 1, False, True),
        ("weights.md", 2, False, True),
        ("weights.md", 3, False, True),
        ("metrics.md", 0, False, True),
        ("metrics.md", 1, False, True),
        ("metrics.md", 2, False, True),
        ("convert.md", 0, False, True),
        ("convert.md", 1, False, True),
        ("iterate.md", 0, False, True),
        ("iterate.md", 1, False, True),
        ("iterate.md", 2, False, True),
        ("sharded.md", 0, False, False),
        ("authors.md", 0, False, False),
        ("authors.md", 1, False, False),
    ],
)
def test_a_loop_of_the_guide(pool: Pool, page: str, at: int, zero: bool, wrapped: bool) -> None:
    first, *others = pool.run(follow, blocks(page)[at], zero, wrapped, ranks=len(COUNTS))
    before = Net().parameters()
    assert all(not torch.equal(ours, theirs) for ours, theirs in zip(first, before, strict=True))
    for state in others:
        torch.testing.assert_close(state, first, atol=0, rtol=0)


def test_fsdp2_accumulates_in_the_second_loop(pool: Pool) -> None:
    """The second loop of the page goes on with the sharded module of the first; both end where one process ends."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    data = [[batch(rank, 0, step) for rank, count in enumerate(COUNTS) if step < count] for step in range(max(COUNTS))]
    for window in [*([step] for step in data), data]:
        parts = [part for step in window for part in step]
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(x), y) * (1 if len(window) == 1 else len(x)) for x, y in parts]
        total = len(parts) if len(window) == 1 else sum(len(x) for x, _ in parts)
        (torch.stack(losses).sum() / total).backward()
        if len(window) == 1:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    code = "optimizer.zero_grad()\n".join(blocks("sharded.md")[:2])
    for found in pool.run(follow, code, False, False, ranks=len(COUNTS)):
        torch.testing.assert_close(found, [each.detach() for each in model.parameters()], atol=1e-6, rtol=0)


SUMS = """
from torch.distributed.fsdp import fully_shard
model = fully_shard(net)
model.set_gradient_divide_factor(1.0)
model.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
optimizer = torch.optim.Adam(model.parameters())
"""


def test_losses_that_are_divided_by_the_samples_of_all_ranks(pool: Pool) -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        parts = [batch(rank, 0, step) for rank, count in enumerate(COUNTS) if step < count]
        x, y = torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])
        (nn.functional.mse_loss(model(x), y, reduction="sum") / len(x)).backward()
        optimizer.step()
    for found in pool.run(follow, SUMS + blocks("sharded.md")[2], False, False, ranks=len(COUNTS)):
        torch.testing.assert_close(found, [each.detach() for each in model.parameters()], atol=1e-6, rtol=0)


def averaged(rank: int, code: str) -> list[torch.Tensor]:
    names: dict[str, Any] = {"torch": torch, "dist": dist, "Join": join.Join, "loss_fn": nn.functional.mse_loss}
    names |= {
        "loader": [batch(rank, 0, step) for step in range(COUNTS[rank])],
        "DistributedDataParallel": DistributedDataParallel,
    }
    names["net"] = net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, TARGETS))
    exec(code, names)
    return [buffer for buffer in net.buffers() if buffer.is_floating_point()]


@pytest.mark.parametrize("over_iterate", [False, True])
def test_statistics_of_batch_norm_are_averaged_by_numbers_of_batches(pool: Pool, over_iterate: bool) -> None:
    norms = [nn.BatchNorm1d(FEATURES) for _ in COUNTS]
    for rank, norm in enumerate(norms):
        for step in range(COUNTS[rank]):
            norm(batch(rank, 0, step)[0])
    kept = [[each.double() for each in norm.buffers()][:2] for norm in norms]
    expected = [
        sum(part * count for part, count in zip(parts, COUNTS, strict=True)) for parts in zip(*kept, strict=True)
    ]
    code = blocks("block.md")[2]
    if over_iterate:
        code = code.replace("size=False):", "size=False) as join:").replace("in loader:", "in join.iterate(loader):")
        code = code.replace("batches += 1", "batches += not join.shadowing")
    for found in pool.run(averaged, code, ranks=len(COUNTS)):
        torch.testing.assert_close([each.double() * sum(COUNTS) for each in found], expected, atol=1e-5, rtol=0)


def test_each_loop_is_run() -> None:
    counts = {"block.md": 4, "weights.md": 4, "metrics.md": 3, "iterate.md": 4, "sharded.md": 3, "authors.md": 2}
    counts |= {"convert.md": 2, "joinable.md": 3, "trainer.md": 6}
    assert {page: len(blocks(page)) for page in counts} == counts


CONTRASTIVE = {  # lines of the guide's loop, and the lines that its table says to write instead
    "the same on all ranks": {},
    "with a parameter": {"@ features.T": "@ features.T * model.module.layers[1].bias.sum().exp()"},
    "own rows": {
        "iterate(loader)": "iterate([(x[: 2 + dist.get_rank()], y) for x, y in loader], weigh=lambda b: len(b[0]))",
        "features = rows_of_all(model(x))": "features = rows_of_all(own := model(x))",
        "features @ features.T, torch.arange(len(features))": (
            "own @ features.T, (own[:, None] == features).all(2).int().argmax(1)"
        ),
    },
    "accumulation": {
        "size=False": "size=True",
        "join.iterate(loader)": "join.iterate(loader, window=2)",
        "join.scale(loss)": "join.scale(loss * dist.get_world_size() / join.total_weight)",
        "optimizer.step()": "optimizer.step() if join.ends_window else None",
        "optimizer.zero_grad()": "optimizer.zero_grad() if not starts % 2 else None; starts += 1",
    },
}


@pytest.mark.parametrize("kind", CONTRASTIVE)
def test_a_loss_over_the_samples_of_all_ranks(pool: Pool, kind: str) -> None:
    """The contrastive losses of the guide give the result of one process."""
    model, code, window = Net(), "starts = 0\n" + blocks("iterate.md")[1], 2 if kind == "accumulation" else 1
    for old, new in CONTRASTIVE[kind].items():
        assert old in code
        code = code.replace(old, new)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(max(COUNTS)):
        ranks = [rank for rank, count in enumerate(COUNTS) if step < count]
        rows = [batch(rank, 0, step)[0][: 2 + rank if kind == "own rows" else None] for rank in ranks]
        features = model(torch.cat(rows))
        factor = model.get_parameter("layers.1.bias").sum().exp() if kind == "with a parameter" else 1
        loss = nn.functional.cross_entropy(features @ features.T * factor, torch.arange(len(features)))
        (loss / min(window, max(COUNTS) - step // window * window)).backward()
        if (step + 1) % window == 0 or step + 1 == max(COUNTS):
            optimizer.step()
            optimizer.zero_grad()
    for found in pool.run(follow, code, False, True, ranks=len(COUNTS)):
        torch.testing.assert_close(found, [each.detach() for each in model.parameters()], atol=1e-6, rtol=0)


def encoder_and_decoder(task: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(task)
    decoder = nn.Linear(4, TARGETS)
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh()), decoder


def follow_on_two_groups(rank: int) -> dict[str, torch.Tensor]:
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    encoder, decoder = encoder_and_decoder(rank // 2)
    names: dict[str, Any] = {"DistributedDataParallel": DistributedDataParallel, "Join": join.Join}
    names |= {
        "encoder": encoder,
        "decoder": decoder,
        "ranks_of_task": groups[rank // 2],
        "loss_fn": nn.functional.mse_loss,
    }
    names |= {"loader": [batch(rank, 0, step) for step in range((2, 5, 3, 0)[rank])]}
    for name, module in ("encoder", encoder), ("decoder", decoder):
        names[f"{name}_optimizer"] = torch.optim.SGD(module.parameters(), lr=0.1)
    exec(blocks("iterate.md")[3], names)
    return flat_state(encoder.state_dict(), decoder.state_dict())


def test_modules_on_several_process_groups(pool: Pool) -> None:
    """A decoder's gradients are divided by the 2 ranks of its task instead of all 4: its rate is twice the rate."""
    encoder, first = encoder_and_decoder(0)
    decoders = [first, encoder_and_decoder(1)[1]]
    optimizer = torch.optim.SGD(encoder.parameters(), lr=0.1)
    for decoder in decoders:
        optimizer.add_param_group({"params": decoder.parameters(), "lr": 0.2})
    for step in range(5):
        optimizer.zero_grad()
        ranks = [rank for rank, count in enumerate((2, 5, 3, 0)) if step < count]
        for rank in ranks:
            x, y = batch(rank, 0, step)
            (nn.functional.mse_loss(decoders[rank // 2](encoder(x)), y) / len(ranks)).backward()
        optimizer.step()
    for rank, state in enumerate(pool.run(follow_on_two_groups, ranks=4)):
        assert_same(state, flat_state(encoder.state_dict(), decoders[rank // 2].state_dict()), 1e-6)


def follow_and_save(rank: int, folder: str, fails: bool) -> None:
    """Run the script about resuming, whose second checkpoint cannot be written if it ``fails``."""
    (script,) = [code for code in blocks("elastic.md") if "import os" in code]
    names: dict[str, Any] = {"__name__": "guide"}
    exec(script, names)
    names["LAST"] = f"{folder}/last.pt"

    def replace(old: str, new: str) -> None:
        if fails and os.path.exists(new):
            raise OSError("disk full")
        os.replace(old, new)

    names["os"] = SimpleNamespace(path=os.path, replace=replace)
    names["train"]()


def test_resuming_in_the_middle_of_an_epoch(ending: Ending, tmp_path: Path) -> None:
    """Three ranks fail, and two continue; all samples count once, as if one process had never failed."""
    folders = [tmp_path / name for name in ("resumed", "alone")]
    for folder in folders:
        folder.mkdir()
    ends = ending.ends(follow_and_save, str(folders[0]), True, ranks=3)
    assert ends[0].error.startswith("OSError: disk full"), ends[0].text
    assert torch.load(folders[0] / "last.pt")["used"] == 5 * 48
    ending.run(follow_and_save, str(folders[0]), False, ranks=2)
    ending.run(follow_and_save, str(folders[1]), False, ranks=1)
    resumed, alone = (torch.load(folder / "last.pt") for folder in folders)
    assert (resumed["epoch"], resumed["used"]) == (alone["epoch"], alone["used"]) == (1, 1000)
    torch.testing.assert_close(resumed["model"], alone["model"], atol=2e-6, rtol=0)


def follow_all(rank: int, page: str) -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for code in blocks(page):
        exec(code, names)


def test_a_joinable_of_ones_own(ending: Ending) -> None:
    ending.run(follow_all, "joinable.md", ranks=1, group=False)


@pytest.mark.timeout(150)
def test_the_trainer(ending: Ending, tmp_path: Path) -> None:
    script, *_ = blocks("trainer.md")
    (tmp_path / "fit.py").write_text(script)
    assert "rank  steps  shadowed" in run_forked(ending, "fit.py", folder=tmp_path, limit=140)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_objects_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, pickles = (block for block in blocks("trainer.md") if "class Cluster" in block or "class Pickles" in block)
    for name, value in {"MY_RANK": "1", "MY_SIZE": "2", "MY_LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    names: dict[str, Any] = {}
    exec(cluster, names)
    assert (names["trainer"].world_size, names["trainer"].global_rank) == (2, 1)
    exec(pickles, names)
    io, path = names["trainer"].strategy.checkpoint_io, str(tmp_path / "new" / "x")
    io.save({"module": {"x": torch.ones(2)}}, path)
    assert io.load(path)["module"]["x"].tolist() == [1, 1]
    io.remove(path)
    assert not Path(path).exists()
