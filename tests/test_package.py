"""The shape of the packages: public names, and what importing costs."""

from __future__ import annotations

import ast
import inspect
import operator
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import join
import join.collectives
import joinables
import joinables.testing
import joinables.trainer
from joinables._torch import versions

ROOT = Path(join.__file__).parent.parent


def test_public_names() -> None:
    assert join.__all__ == [
        "Burst",
        "EarlyTerminationError",
        "Join",
        "JoinConfig",
        "JoinError",
        "JoinHook",
        "JoinReport",
        "JoinTimeoutError",
        "Joinable",
        "PeerError",
        "ProtocolError",
        "register_joinable",
    ]
    assert set(joinables.__all__) == {
        *join.__all__,
        "BucketRebuild",
        "BufferSync",
        "GradientSync",
        "LossGate",
        "Mean",
        "ShardedModule",
        "State",
        "TorchJoinable",
        "ZeroStep",
        "steps",
    }
    assert joinables.trainer.__all__ == [
        "CSVLogger",
        "Callback",
        "CheckpointIO",
        "DDPStrategy",
        "EarlyStopping",
        "FileCheckpointIO",
        "HorovodStrategy",
        "LaunchError",
        "Launcher",
        "ModelCheckpoint",
        "NotPicklable",
        "RemoteTraceback",
        "Strategy",
        "TrainModule",
        "Trainer",
        "UnevenDistributedSampler",
        "WorkerDied",
        "WorkerRaised",
        "XLAStrategy",
        "register_strategy",
        "strategies",
    ]
    assert join.collectives.__all__ == [
        "DONE",
        "Collective",
        "Line",
        "ReduceOp",
        "SingleCollective",
        "Sum",
        "ThreadCollective",
        "TorchCollective",
        "Work",
        "collective_of",
        "run_threads",
    ]
    assert joinables.testing.__all__ == [
        "NotExact",
        "RankFailed",
        "assert_equals_one_process",
        "run_ranks",
        "uneven",
    ]
    for package in (join, joinables, join.collectives, joinables.testing, joinables.trainer):
        for name in package.__all__:
            assert name == "ReduceOp" or getattr(package, name).__doc__, name


def parameters_of(function: Callable[..., Any]) -> str:
    """What a function takes, without types."""
    shown: list[str] = []
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(f"{stars}{each.name}{'' if each.default is each.empty else f'={each.default!r}'}")
    return ", ".join(shown)


SIGNATURES = {
    "Join": "joinables, enable=True, throw_on_early_termination=False, *, timeout=None,"
    " process_group=Ellipsis, loss_divided_by=1,"
    " own_attributes=(), **kwargs",
    "Join.close": "self, error=None",
    "Join.current": "process_group=None",
    "Join.is_open_on": "group",
    "Join.iterate": "self, loader, until='all', *, dummy='empty', lookahead=1, weigh=None, window=1, fill_window=False,"
    " resumable=False",
    "Join.loader_state": "self",
    "Join.mean": "self, value, weight=None",
    "Join.notify_join_context": "joinable",
    "Join.open": "self",
    "Join.scale": "self, loss, divided_over=None",
    "Joinable.attach": "self, join",
    "Joinable.before_entering": "self, listed",
    "Joinable.check_divisor": "self, world_size",
    "Joinable.detach": "self",
    "Joinable.equal_values": "self",
    "Joinable.exchange": "self, source",
    "Joinable.held": "self",
    "Joinable.join_hook": "self, **kwargs",
    "Joinable.own_tensors": "self",
    "Joinable.synchronise_own": "self, source",
    "JoinHook.main_hook": "self",
    "JoinHook.post_hook": "self, is_last_joiner",
    "Burst.flags": "self, active",
    "Burst.check_leavers": "self",
    "Burst.fulfil": "self",
    "Burst.hand_over": "self, leader",
    "JoinConfig": "enable, throw_on_early_termination, is_first_joinable",
    "JoinConfig.construct_disabled_join_config": "",
    "register_joinable": "cls, adapter",
}


def test_public_signatures() -> None:
    found = {name: parameters_of(operator.attrgetter(name)(join)) for name in SIGNATURES}
    assert found == SIGNATURES
    for kind in (join.Join, join.Joinable, join.JoinHook, join.Burst):
        methods = {name for name, each in vars(kind).items() if inspect.isroutine(each) and not name.startswith("_")}
        assert {name for name in methods if f"{kind.__name__}.{name}" not in SIGNATURES} == set()
    properties = {name for name, each in vars(join.Join).items() if isinstance(each, property) and name[0] != "_"}
    assert properties == {
        "channel",
        "collective",
        "ends_window",
        "is_last_step",
        "pending",
        "report",
        "shadowing",
        "total_weight",
        "weight",
    }


def test_errors_form_one_family() -> None:
    assert issubclass(join.JoinError, RuntimeError)
    for name in ("EarlyTerminationError", "PeerError", "ProtocolError", "JoinTimeoutError"):
        assert issubclass(getattr(join, name), join.JoinError)


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_nothing_but_torch_and_typing_extensions_is_imported() -> None:
    allowed = {"torch", "typing_extensions", "join", "joinables", "__future__"} | set(sys.stdlib_module_names)
    for package in ("join", "joinables"):
        for path in (ROOT / package).rglob("*.py"):
            assert {name.split(".")[0] for name in imports_of(path)} <= allowed, path


def test_tests_and_tutorials_say_what_they_shard_over() -> None:
    # Their models are on the CPU, and without a mesh fully_shard takes a GPU that the machine has.
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "tutorials").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fully_shard":
                assert any(keyword.arg == "mesh" for keyword in node.keywords), f"{path}:{node.lineno}"


def python(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


IMPORTS = """
import sys, warnings
import join, joinables, joinables.trainer
weight = ["torch.distributed.optim", "torch._dynamo", "tensorboard", "matplotlib", "torchmetrics", "sklearn"]
print([name for name in weight if name in sys.modules])
old = warnings.filters[:]
joinables.ZeroStep
print(warnings.filters == old)
"""


def test_importing_is_silent_leaves_filters_alone_and_pulls_in_no_optional_weight() -> None:
    result = python("-W", "error", "-c", IMPORTS)
    assert (result.stdout, result.stderr) == ("[]\nTrue\n", "")


WORKER = """
from joinables.trainer import Launcher
weight = "torch.distributed.optim torch._dynamo tensorboard torchmetrics sklearn matplotlib sympy"
print(Launcher(2).launch(eval, f"[name for name in {weight.split()} if name in __import__('sys').modules]"))
"""


def test_a_worker_imports_nothing_that_it_does_not_use() -> None:
    result = python("-c", WORKER)
    assert (result.stdout, result.stderr) == ("[]\n", "")


LACKING = {
    "torch.distributed.Reducer._rebuild_buckets": "del torch.distributed.Reducer._rebuild_buckets",
    "torch.nn.parallel.DistributedDataParallel._sync_module_buffers": (
        "del torch.nn.parallel.DistributedDataParallel._sync_module_buffers"
    ),
    "torch._C._dynamo.eval_frame.set_code_exec_strategy": "del torch._C._dynamo.eval_frame.set_code_exec_strategy",
    "torch.optim.lr_scheduler.LRScheduler": "del torch.optim.lr_scheduler.LRScheduler",
    "torch.distributed.optim.ZeroRedundancyOptimizer._sync_params": (
        "import torch.distributed.optim; del torch.distributed.optim.ZeroRedundancyOptimizer._sync_params"
    ),
}


WITHOUT = """
import os, warnings
warnings.simplefilter("ignore")
import torch._dynamo, torch.distributed.algorithms.join, torch.nn.parallel, torch.optim.lr_scheduler
for change in {changes}:
    if os.fork():
        os.wait()
        continue
    exec(change)
    try:
        import joinables, joinables.zero
    except ImportError as error:
        print(error, flush=True)
    os._exit(0)  # or each would free all that was imported, which takes a second
"""


def test_unsupported_torch_is_one_error() -> None:
    told = python("-c", WITHOUT.format(changes=list(LACKING.values()))).stdout.splitlines()
    versions_told = f", which torch {torch.__version__} does not have. Install torch {versions.SUPPORTED}. [J103]"
    for missing, text in zip(LACKING, told, strict=True):
        assert text.startswith("joinables needs ")
        assert missing in text
        assert text.endswith(versions_told)


def test_a_package_that_torch_needs_is_not_blamed_on_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError, match="tensorboard"):
        versions.require({"torch.utils.tensorboard": ("SummaryWriter",)})
    with pytest.raises(ImportError, match=r"joinables needs torch\.utils\.cheese, which torch"):
        versions.require({"torch.utils.cheese": ("cheddar",)})


def test_what_is_said_of_versions_of_torch_agrees() -> None:
    oldest, newest = versions.SUPPORTED.split(" to ")
    assert f"\n    torch>={oldest}\n" in (ROOT / "setup.cfg").read_text()
    for path in (".ci/nightly", ".github/workflows/ci.yml", "README.md"):
        for version in (oldest, newest):
            assert re.search(rf"\b{re.escape(version)}\b", (ROOT / path).read_text()), (path, version)


def test_another_join_is_named(tmp_path: Path) -> None:
    (tmp_path / "join.py").touch()
    (tmp_path / "train.py").write_text("from joinables import Join")
    told = python(str(tmp_path / "train.py")).stderr.splitlines()[-1]
    assert told == f"ImportError: {tmp_path / 'join.py'} hides the package join of this library. Rename it. [J890]"


def test_joinables_hands_out_what_join_does() -> None:
    assert all(getattr(joinables, name) is getattr(join, name) for name in join.__all__)
