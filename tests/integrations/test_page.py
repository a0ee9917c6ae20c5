"""The pages of docs/frameworks: their code ends where one process ends, and what they say is refused is refused."""

from __future__ import annotations

import ast
import re
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import joinables
from tests.ending import Ending
from tests.integrations.ranks import accelerator, launched
from tests.models import assert_same
from tests.pool import Pool

PACKAGE = Path(joinables.__file__).parent
TEXT = "".join(page.read_text() for page in sorted((PACKAGE.parent / "docs" / "frameworks").iterdir()))
SECTIONS = dict(re.findall(r"^##? (.*?)$(.*?)(?=^##? |\Z)", TEXT, re.DOTALL | re.MULTILINE))
COUNTS = 5, 2


def code_after(heading: str) -> str:
    """What the page makes of a script."""
    _, after = re.findall(r"^```python\n(.*?)^```", SECTIONS[heading], re.DOTALL | re.MULTILINE)
    return after


def fit(rank: int) -> list[torch.Tensor]:
    from tests.integrations.lightning.training import Case, Module, loader_of, quiet, trainer_of

    quiet(rank)
    case = Case(counts=COUNTS)
    module = Module(case)

    def trainer(**options: Any) -> Any:
        return trainer_of(case, **options)

    exec(
        code_after("Uneven data in Lightning"),
        {"Trainer": trainer, "module": module, "loader": loader_of("stream", rank, COUNTS[rank])},
    )
    return module.state()


def train_in_fabric(rank: int) -> list[torch.Tensor]:
    from lightning.fabric import Fabric  # pyright: ignore[reportMissingImports]

    from tests.integrations.lightning.training import Case, batch, build, flat, optimizers_of, quiet

    quiet(rank)
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    net = build(Case())
    optimizer, _ = optimizers_of(net)
    names = {"fabric": fabric, "net": net, "optimizer": optimizer, "mse_loss": mse_loss}
    exec(code_after("Fabric"), {**names, "loader": [batch(rank, step) for step in range(COUNTS[rank])]})
    return flat(net, optimizer)


@pytest.mark.parametrize(("train", "scheduler", "epochs"), [(fit, "step", 2), (train_in_fabric, "none", 1)])
def test_lightning(ending: Ending, train: Any, scheduler: str, epochs: int) -> None:
    pytest.importorskip("lightning", reason="needs the extra lightning: make test-frameworks")
    from tests.integrations.lightning.training import Case, in_one_process

    expected = in_one_process(Case(counts=COUNTS, scheduler=scheduler, epochs=epochs))
    for state in ending.run(train, ranks=2):
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=2e-6)


def train_in_accelerate(rank: int) -> dict[str, torch.Tensor]:
    from tests.integrations.accelerate.training import Case, batches_of, objects, state_of

    with launched():
        net, optimizer, scheduler = objects()
        names = {"accelerator": accelerator(gradient_accumulation_steps=2), "net": net, "optimizer": optimizer}
        names |= {"scheduler": scheduler, "mse_loss": mse_loss, "loader": batches_of(Case(weighted=True), rank, 0)}
        exec(code_after("Uneven data in Accelerate"), names)
        return state_of(net, optimizer, scheduler)


def test_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    from tests.integrations.accelerate.training import Case, alone

    expected = alone(Case(accumulate=2, weighted=True), epochs=1, clips=False)
    for state in pool.run(train_in_accelerate, ranks=2, timeout=40):
        assert_same(state, expected, 1e-5)


def first_code(heading: str) -> str:
    """The first code below a heading of Accelerate's page."""
    page = PACKAGE.parent / "docs" / "frameworks" / "accelerate.md"
    found = re.search(rf"^## {heading}$.*?^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


def evaluate_in_accelerate(rank: int) -> tuple[int, list[int]]:
    """Evaluate on the page's loader once rank 0 is out of data, and on data of each rank in each step."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        net, counted, sums = torch.nn.Linear(3, 2), list[torch.Tensor](), list[int]()
        model, optimizer = accelerate.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        held_out = TensorDataset(torch.ones(13, 3), torch.arange(13) % 2)

        def train(x: torch.Tensor, y: torch.Tensor) -> None:
            accelerate.backward(mse_loss(model(x), y))
            own = torch.tensor((5, 8)[rank])
            torch.distributed.all_reduce(own)
            sums.append(int(own))

        names: dict[str, Any] = {"join_uneven_inputs": join_uneven_inputs, "accelerator": accelerate, "train": train}
        names |= {"metric": SimpleNamespace(add_batch=lambda _, labels: counted.append(labels))}
        names |= {"eval_loader": accelerate.prepare(DataLoader(held_out, batch_size=2)), "optimizer": optimizer}
        names |= {"model": model, "loader": [(torch.ones(2, 3), torch.ones(2, 2))] * (1, 3)[rank]}
        exec(first_code("Evaluate in the training loop"), names)
        return sum(map(len, counted)), sums


def test_an_evaluation_in_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    assert pool.run(evaluate_in_accelerate, ranks=2, timeout=40) == [(13, [13] * 3)] * 2


def divide_in_accelerate(rank: int) -> dict[str, torch.Tensor]:
    from joinables.integrations.accelerate import join_uneven_inputs
    from tests.integrations.accelerate.micro_batches import STEPS, data_of
    from tests.models import build

    with launched():
        accelerate, net = accelerator(gradient_accumulation_steps=STEPS), build("mlp")
        model, optimizer = accelerate.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        names: dict[str, Any] = {"join_uneven_inputs": join_uneven_inputs, "accelerator": accelerate, "torch": torch}
        names |= {"model": model, "optimizer": optimizer, "mse_loss": mse_loss, "loader": data_of(rank)}
        exec(first_code("Batches of several sizes"), names)
        return net.state_dict()


def test_losses_that_are_divided_in_accelerate(pool: Pool) -> None:
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")
    from tests.integrations.accelerate.micro_batches import alone, divide

    for state in pool.run(divide_in_accelerate, ranks=2, timeout=40):
        assert_same(state, alone(divide), 1e-5)


def train_in_transformers(rank: int) -> dict[str, torch.Tensor]:
    from tests.integrations.transformers.lm import Stream, llama, sentences
    from tests.integrations.transformers.training import parameters, trainer_of

    with launched(), tempfile.TemporaryDirectory() as folder:
        made = trainer_of(rank, "tokens", folder)
        names: dict[str, Any] = {"model": llama(), "arguments": made.args}
        names["stream_of_rank"] = partial(Stream, sentences)
        exec(code_after("Uneven data in Transformers"), names)
        return parameters(names["trainer"])


def test_transformers(pool: Pool) -> None:
    pytest.importorskip("transformers", reason="Transformers is not installed: pip install joinables[transformers]")
    pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[transformers]")
    from tests.integrations.transformers.lm import alone, llama, sentences
    from tests.integrations.transformers.training import STEPS

    expected, _, _ = alone(llama(), sentences, 1, STEPS[1])
    for state in pool.run(train_in_transformers, ranks=2, timeout=40):
        assert_same(state, expected, 1e-5)


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
