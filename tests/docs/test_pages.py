"""Examples of the guide that need a test of their own: more ranks, processes that end, or another reference."""

from __future__ import annotations

import os
import traceback
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import join
import joinables.testing
from join import Join, PeerError
from joinables.trainer import ModelCheckpoint, Trainer, TrainModule, UnevenDistributedSampler
from tests.docs.names import Names, Net
from tests.ending import Ending
from tests.examples import examples_in_docstrings, examples_of
from tests.harness import Pool
from tests.scripts import run_forked
from tests.training import FEATURES, TARGETS, assert_same, batch, flat_state, whole

ROOT = Path(join.__file__).parent.parent
COUNTS = 0, 3, 1


def blocks(page: str) -> list[str]:
    """Return the code of each block of a page; of one that continues another, with that before it."""
    return [each.code for each in examples_of(page)]


def follow(rank: int, code: str) -> list[torch.Tensor]:
    """Run a block; where the parameters end."""
    given = Names(code, "map", loader=[batch(rank, 0, step) for step in range(COUNTS[rank])])
    given.run()
    return whole([parameter.detach() for parameter in given.net.parameters()])


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
    for found in pool.run(follow, SUMS + blocks("sharded.md")[2], ranks=len(COUNTS)):
        torch.testing.assert_close(found, [each.detach() for each in model.parameters()], atol=1e-6, rtol=0)


def averaged(rank: int, code: str) -> list[torch.Tensor]:
    net = nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Linear(FEATURES, TARGETS))
    Names(code, "map", loader=[batch(rank, 0, step) for step in range(COUNTS[rank])], net=net).run()
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
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
    for found in pool.run(follow, code, ranks=len(COUNTS)):
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


# -- saving and resuming ----------------------------------------------------------------------------------------------


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


class Regression(TrainModule):
    """Fails at a step of the third epoch, if it is to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer, self.fails = Net(), fails

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.fails and self.trainer.global_step == 110:
            raise OSError("disk full")
        return self.layer.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def test_resuming_with_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x = torch.randn(40 * 48, FEATURES)
    names = {"Path": Path, "DataLoader": DataLoader, "dataset": TensorDataset(x, x[:, :TARGETS])}
    names |= {"ModelCheckpoint": ModelCheckpoint, "Trainer": partial(Trainer, devices=1, logger=False, seed=0)}
    states = []
    for folder, modules in {"resumed": [Regression(fails=True), Regression()], "alone": [Regression()]}.items():
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        for module in modules:
            with pytest.raises(OSError, match="disk full") if module.fails else nullcontext():
                exec(blocks("elastic.md")[0], {**names, "module": module})
        states.append(modules[-1].state_dict())
    torch.testing.assert_close(*states, atol=0, rtol=0)


def read(rank: int, saved: Any, stop: int) -> tuple[list[int], Any]:
    """Resume from what was saved, and read until so many steps are made. Return the samples, and what to save."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    saving, resuming = blocks("elastic.md")[2:]
    numbers: Any = range(23)
    sampler: Any = UnevenDistributedSampler(numbers, shuffle=True, block_size=4 // dist.get_world_size())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchdata calls a function of torch that is deprecated
        loader = StatefulDataLoader(numbers, sampler.block_size, sampler=sampler)
    names = {"dist": dist, "rank": rank, "world_size": dist.get_world_size(), "sampler": sampler, "loader": loader}
    names |= {"epoch": 1, "saved": saved}
    sampler.set_epoch(1)
    if saved:
        exec(resuming, names)
    steps, found = saved["steps"] if saved and len(saved["loaders"]) == dist.get_world_size() else 0, list[int]()
    with Join([], process_group=None) as block:
        for batch in block.iterate(loader, resumable=True):
            steps += 1
            found += batch.tolist()
            exec(saving, names | {"join": block, "steps": steps}, names)
            if steps == stop:
                break
    return found, names["state"]


@pytest.mark.parametrize("ranks", [2, 1])
def test_states_of_loaders(pool: Pool, ranks: int) -> None:
    """Two ranks stop after two steps, and again; these or one rank read the rest. Each sample is read once."""
    (first, state), (second, _) = pool.run(read, None, 2, ranks=2)
    (third, state), (fourth, _) = pool.run(read, state, 4, ranks=2)
    rest = [each for found, _ in pool.run(read, state, 100, ranks=ranks) for each in found]
    assert sorted(first + second + third + fourth + rest) == list(range(23))


# -- ranks that end ---------------------------------------------------------------------------------------------------


def fail(rank: int) -> str:
    try:
        [code] = [each for each in blocks("hang.md") if "shard-7" in each]
        Names(code, "map").run()
    except (OSError, PeerError) as error:
        return f"[rank{rank}]: {traceback.format_exception_only(error)[0]}"
    return ""


def test_a_rank_that_fails(pool: Pool) -> None:
    """The ranks show the errors of the page."""
    shown = examples_of("hang.md", "text")[1].code
    assert "".join(reversed(pool.run(fail, ranks=2))) == shown


def follow_end(rank: int) -> None:
    [code] = [each for each in blocks("hang.md") if "destroy_process_group" in each]
    exec(code, {"dist": dist})


def test_the_end_of_a_script(ending: Ending) -> None:
    ending.run(follow_end, ranks=2)


# -- processes that an example starts ---------------------------------------------------------------------------------


def follow_all(rank: int, page: str) -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for code in blocks(page):
        exec(code, names)


def test_a_joinable_of_ones_own(ending: Ending) -> None:
    ending.run(follow_all, "joinable.md", ranks=1, group=False)


def in_forks(rank: int) -> None:
    """Run the examples of functions for tests, in processes that need no file."""
    examples = {each.name: each.code for each in examples_in_docstrings(joinables.testing)}
    names = {"torch": torch, "dist": dist, "Join": Join, "DistributedDataParallel": DistributedDataParallel}
    names |= {"make_model": Net, "loss_fn": nn.functional.mse_loss, "batches": [batch(0, 0, at) for at in range(8)]}
    for name in "run_ranks", "assert_equals_one_process":
        names[name] = partial(getattr(joinables.testing, name), start_method="fork")
        exec(examples[name], names)
    names["test_train"]()


def test_functions_for_tests(ending: Ending) -> None:
    ending.run(in_forks, ranks=1, group=False)


# -- the trainer ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(150)
def test_the_trainer(ending: Ending, tmp_path: Path) -> None:
    script, *_ = blocks("trainer.md")
    (tmp_path / "fit.py").write_text(script)
    assert "rank  steps  shadowed" in run_forked(ending, "fit.py", folder=tmp_path, limit=140)
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_methods_of_a_module(tmp_path: Path) -> None:
    """A value is logged by the counts of the module, and results of a hook are taken."""
    methods: dict[str, Any] = {}
    for code in blocks("trainer.md")[1:3]:
        exec(code, methods)

    class Module(Regression):
        batch_size, results_to_return = methods["batch_size"], methods["results_to_return"]
        take_results = methods["take_results"]

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.embeddings, self.seconds = batch.labels, 2.5
            self.log("labels", batch.labels.mean())
            return self.layer(torch.ones(1, FEATURES)).sum()

    module = Module()
    trainer = Trainer(devices=1, max_epochs=1, logger=False, default_root_dir=tmp_path)
    trainer.fit(module, [Labelled(torch.tensor([1.0, 2.0])), Labelled(torch.tensor([6.0]))])
    assert trainer.callback_metrics["labels"] == 3
    assert (module.embeddings.tolist(), module.seconds) == ([6], 2.5)


class Labelled:
    """A batch, such as a graph."""

    def __init__(self, labels: torch.Tensor) -> None:
        self.labels = labels

    def to(self, device: torch.device) -> Labelled:
        return Labelled(self.labels.to(device))
