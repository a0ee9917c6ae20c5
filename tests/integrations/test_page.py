"""The pages of docs/frameworks: each example ends where one process ends, and what they say is refused is refused.

The examples run as they stand, on uneven data: a map-style data set whose loader the framework prepares, and a stream
for each rank.
"""

from __future__ import annotations

import ast
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import joinables
from join import Join
from tests.ending import Ending
from tests.examples import DOCS, after, examples_of, in_loop_of
from tests.harness import Pool
from tests.integrations.ranks import accelerator, imported, launched
from tests.integrations.samples import (
    BOTH,
    RANKS,
    SIZE,
    Data,
    Net,
    Trained,
    adam,
    alone,
    assert_as_one_process,
    steps_of,
)

PACKAGE = Path(joinables.__file__).parent
PAGES = sorted((DOCS / "frameworks").iterdir())
EXAMPLES = [
    each for page in PAGES for each in examples_of(f"frameworks/{page.name}") if not (each.before or each.apart)
]
TEXT = "".join(page.read_text() for page in PAGES)


def run(example: str, names: dict[str, Any], at_end_of_loop: str = "") -> None:
    """Run an example with names that its page leaves to the reader."""
    [code] = [each.code for each in EXAMPLES if each.name == example]
    exec(in_loop_of(code, at_end_of_loop) if at_end_of_loop else code, names)


def test_each_example_is_run() -> None:
    text = Path(__file__).read_text() + (Path(__file__).parent / "ray" / "page.py").read_text()
    assert [each.name for each in EXAMPLES if f'"{each.name}"' not in text] == []
    assert sorted({page.name for page in PAGES}) == [
        "accelerate.md",
        "lightning.md",
        "other.md",
        "ray.md",
        "transformers.md",
    ]


# -- Accelerate -------------------------------------------------------------------------------------------------------


def in_table(start: str) -> list[str]:
    """What a table of the page says to write, in its row that starts so."""
    found = re.search(rf"^\| {start}[^|]*\|([^|]*)\|$", TEXT, re.MULTILINE)
    assert found is not None
    return re.findall(r"`([^`]+)`", found[1])


def in_accelerate(rank: int, function: Callable[..., list[float]], steps: int = 1) -> list[Trained]:
    """Call a function for each data, with an accelerator, the names of objects for an example, and what it logs."""
    from joinables.integrations.accelerate import join_uneven_inputs

    found: list[Any] = []
    for data in BOTH:
        with launched():
            accelerate, net = accelerator(gradient_accumulation_steps=steps), Net()
            names: dict[str, Any] = {"accelerator": accelerate, "join_uneven_inputs": join_uneven_inputs, "net": net}
            loader = data.loader(rank)
            names |= {"loader": accelerate.prepare(loader) if data.kind == "map" else loader, "torch": torch}
            names |= {"mse_loss": mse_loss, "optimizer": adam(net)}
            logged = function(accelerate, rank, data, names)
            found.append(Trained(net.state_dict(), net.seen, logged))
    return found


def train_and_log(accelerate: Any, rank: int, data: Data, names: dict[str, Any]) -> list[float]:
    """Train as the page says, and log as it says: each loss, each value of the batch, and a sum of this rank."""
    mean, rows = in_table("a loss, after")[0], in_table("any other value of one batch")[0]
    add, _, of_all = in_table("a sum of your own")

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        names["loss"], names["value"] = mse_loss(x, y), mse_loss(x, y, reduction="none").flatten().detach()
        return names["loss"]

    names |= {"mse_loss": loss_of, "scheduler": torch.optim.lr_scheduler.ExponentialLR(names["optimizer"], 0.9)}
    names |= {"total": torch.zeros(()), "means": [], "of_rows": []}
    run("Uneven data in Accelerate", names, f"means.append({mean})\nof_rows.append({rows})\n{add}\n")
    return [*map(float, names["means"]), *map(float, names["of_rows"]), float(eval(of_all, names))]


def evaluate(accelerate: Any, rank: int, data: Data, names: dict[str, Any]) -> list[float]:
    """Log the samples of evaluations, and the sum of numbers of each rank in each step."""
    counted, sums = list[torch.Tensor](), list[float]()
    names["model"], optimizer = accelerate.prepare(names["net"], names["optimizer"])

    def train(x: torch.Tensor, y: torch.Tensor) -> None:
        accelerate.backward(mse_loss(names["model"](x), y))
        optimizer.step()
        optimizer.zero_grad()
        own = torch.tensor((5.0, 8.0)[rank])
        torch.distributed.all_reduce(own)
        sums.append(float(own))

    held_out = TensorDataset(torch.ones(13, 3), torch.arange(13.0))
    names |= {"metric": SimpleNamespace(add_batch=lambda _, labels: counted.append(labels)), "train": train}
    names |= {"eval_loader": accelerate.prepare(DataLoader(held_out, batch_size=2)), "optimizer": optimizer}
    run("Evaluate in the training loop", names)
    return sorted(torch.cat(counted).tolist()) + sums


def divide(accelerate: Any, rank: int, data: Data, names: dict[str, Any]) -> list[float]:
    names["model"], names["optimizer"] = accelerate.prepare(names["net"], names["optimizer"])
    run("Batches of several sizes", names)
    return []


def test_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    results = pool.run(in_accelerate, train_and_log, 2, ranks=RANKS, timeout=60)
    for data, *ranks in zip(BOTH, *results, strict=True):
        expected = alone(ranks, window=2, decay=0.9**RANKS)
        means = alone(ranks, logs_by_samples=False, window=2, decay=0.9**RANKS).logged
        total = sum(mean * sum(map(len, step)) for mean, step in zip(expected.logged, steps_of(ranks), strict=True))
        assert_as_one_process(data, ranks, replace(expected, logged=[*means, *expected.logged, total]))


def test_an_evaluation_in_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    results = pool.run(in_accelerate, evaluate, ranks=RANKS, timeout=60)
    for data, *ranks in zip(BOTH, *results, strict=True):
        expected = alone(ranks, by_samples=False)
        assert_as_one_process(
            data, ranks, replace(expected, logged=[*map(float, range(13)), *[13.0] * len(steps_of(ranks))])
        )


def in_a_migrated_script(rank: int) -> list[Trained]:
    found: list[Trained] = []
    for data in BOTH:
        if data.kind == "map":
            with launched():
                net = Net()
                names: dict[str, Any] = {"Accelerator": accelerator, "Join": Join, "model": net, "optimizer": adam(net)}
                names["loader"] = data.loader(rank)
                names |= {"DataLoaderConfiguration": imported("accelerate.utils").DataLoaderConfiguration}

                def step(x: torch.Tensor, y: torch.Tensor, names: dict[str, Any] = names) -> None:
                    names["optimizer"].zero_grad()
                    mse_loss(names["model"](x), y).backward()
                    names["optimizer"].step()

                code = after(examples_of("migrate.md", "diff")[2].code)
                names["step"] = step
                exec(code, names)
                found.append(Trained(net.state_dict(), net.seen, []))
    return found


def test_migrating_from_accelerate(pool: Pool) -> None:
    """With a map-style data set; Accelerate distributes a stream itself, and its collectives need join.iterate."""
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    results = pool.run(in_a_migrated_script, ranks=RANKS, timeout=60)
    for data, *ranks in zip([data for data in BOTH if data.kind == "map"], *results, strict=True):
        assert_as_one_process(data, ranks, replace(alone(ranks, by_samples=False), logged=[]))


def test_losses_that_are_divided_in_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    results = pool.run(in_accelerate, divide, 2, ranks=RANKS, timeout=60)
    for data, *ranks in zip(BOTH, *results, strict=True):
        assert_as_one_process(data, ranks, replace(alone(ranks, window=2), logged=[]))


# -- Lightning --------------------------------------------------------------------------------------------------------


def in_lightning(rank: int, package: str) -> list[Trained]:
    """Log the loss of each step, and of the epoch."""
    if package == "pytorch_lightning":  # as in a process that has imported nothing of the newer name
        for name in [each for each in sys.modules if re.match(r"lightning\b|joinables\.integrations\.lightning", each)]:
            del sys.modules[name]
    pl = imported(package)
    imported("joinables.integrations.lightning")
    from tests.integrations.lightning.training import quiet

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.losses = Net(), list[float]()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = mse_loss(self.net(batch[0]), batch[1])
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True, batch_size=len(batch[0]))
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.losses.append(self.trainer.callback_metrics["loss_step"].item())

        def configure_optimizers(self) -> Any:
            return adam(self.net)

    quiet(rank)
    silent = {f"enable_{name}": False for name in ("checkpointing", "progress_bar", "model_summary")}
    trainer = partial(pl.Trainer, accelerator="cpu", max_epochs=1, logger=False, **silent)
    found: list[Trained] = []
    for data in BOTH:
        module = Module()
        run("Uneven data in Lightning", {"Trainer": trainer, "module": module, "loader": data.loader(rank)})
        module.losses.append(module.trainer.callback_metrics["loss_epoch"].item())
        found.append(Trained(module.net.state_dict(), module.net.seen, module.losses))
    return found


def in_fabric(rank: int, example: str) -> list[Trained]:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    from tests.integrations.lightning.training import quiet

    quiet(rank)
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy="ddp")
    fabric.launch()
    [subset] = re.findall(r"`(Subset\(dataset, range\(fabric.*\))`", TEXT)
    found: list[Trained] = []
    for data in BOTH:
        net, means = Net(), list[Any]()
        names: dict[str, Any] = {"fabric": fabric, "net": net, "optimizer": adam(net), "torch": torch, "means": means}
        names |= {"mse_loss": mse_loss, "loader": (loader := data.loader(rank))}
        if data.kind == "map":
            own = eval(subset, {"Subset": Subset, "dataset": loader.dataset, "fabric": fabric})
            names["loader"] = fabric.setup_dataloaders(DataLoader(own, SIZE), use_distributed_sampler=False)
        run(example, names, "means.append(mean.item())" if example != "Fabric" else "")
        found.append(Trained(net.state_dict(), net.seen, means))
    return found


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning(ending: Ending, package: str) -> None:
    pytest.importorskip(package.partition(".")[0], reason="needs the extra lightning: make test-frameworks")
    for data, *ranks in zip(BOTH, *ending.run(in_lightning, package, ranks=RANKS), strict=True):
        expected = alone(ranks)
        counts = [sum(map(len, step)) for step in steps_of(ranks)]
        mean = sum(loss * count for loss, count in zip(expected.logged, counts, strict=True)) / sum(counts)
        assert_as_one_process(data, ranks, replace(expected, logged=[*expected.logged, mean]))


@pytest.mark.parametrize("example", ["Fabric", "Means and evaluation in Fabric"])
def test_fabric(ending: Ending, example: str) -> None:
    pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")
    for data, *ranks in zip(BOTH, *ending.run(in_fabric, example, ranks=RANKS), strict=True):
        expected = alone(ranks)
        assert_as_one_process(data, ranks, expected if example != "Fabric" else replace(expected, logged=[]))


# -- Transformers -----------------------------------------------------------------------------------------------------


class Named(IterableDataset[Any]):
    """The samples of a data set or stream, under the names of a model's arguments."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return ({"x": x, "labels": y} for x, y in self.samples)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": mse_loss(self.net(x), labels)}


def in_transformers(rank: int) -> list[Trained]:
    from transformers import TrainingArguments

    found: list[Trained] = []
    for data in BOTH:
        with launched(), tempfile.TemporaryDirectory() as folder:
            how: dict[str, Any] = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
            how |= {"per_device_train_batch_size": SIZE, "num_train_epochs": 1, "logging_steps": 1}
            how |= {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
            how |= {"dataloader_pin_memory": False, "optim": "adamw_torch"}
            if data.kind == "stream":
                how["max_steps"] = -(-max(len(data.share(each)) for each in range(RANKS)) // SIZE)
            model, named = Model(), Named(data.loader(rank).dataset)
            names: dict[str, Any] = {"arguments": TrainingArguments(folder, **how), "model": model}
            names["stream_of_rank"] = lambda _, named=named, kind=data.kind: list(named) if kind == "map" else named
            run("Uneven data in Transformers", names)
            logged = [entry["loss"] for entry in names["trainer"].state.log_history if "loss" in entry]
            found.append(Trained(model.net.state_dict(), model.net.seen, logged))
    return found


def test_transformers(pool: Pool) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")
    for data, *ranks in zip(BOTH, *pool.run(in_transformers, ranks=RANKS, timeout=60), strict=True):
        assert_as_one_process(data, ranks, alone(ranks, by_samples=False))


# -- what is refused --------------------------------------------------------------------------------------------------


def sentences_of(tree: ast.AST) -> list[str]:
    """The texts in a module, as patterns: whatever is put into them matches anything."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [each.value if isinstance(each, ast.Constant) else None for each in node.values]
            found.append("".join(".*" if part is None else re.escape(str(part)) for part in parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.escape(node.value))
    return found


def test_what_is_refused_is_what_is_said() -> None:
    trees = [ast.parse(path.read_text()) for path in (PACKAGE / "integrations").rglob("*.py")]
    patterns = [
        re.sub(r"\\ \\\[J\d+\\\]$", "", each) for tree in trees for each in sentences_of(tree) if len(each) > 30
    ]
    told: list[str] = re.findall(r"^\| [^|]+ \| `([^|]+)` \|$", TEXT, re.MULTILINE)
    assert len(told) > 15
    assert [sentence for sentence in told if not any(re.fullmatch(each, sentence) for each in patterns)] == []
