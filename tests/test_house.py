"""How the house is kept: imports, private names of torch, what the tour's pictures show; tests stand alone."""

from __future__ import annotations

import ast
import atexit
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed.algorithms
from torch.utils._device import _device_constructors  # pyright: ignore[reportPrivateUsage]

import join
from joinables.integrations import VERSIONS, framework
from tests.harness import in_test_all

ROOT = Path(join.__file__).parent.parent
FILES = sorted(path for package in ("join", "joinables") for path in (ROOT / package).rglob("*.py"))
PRIVATE_ROOMS = (
    ROOT / "joinables" / "_torch",
    ROOT / "join" / "collectives" / "_torch_private.py",
)


@cache
def trees_of_files() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PATHS = {name_of(path): path for path in FILES}
MODULES = set(PATHS)


def imported(tree: ast.AST, module: str, *, is_package: bool) -> set[str]:
    """The modules of ours that a module imports: for type checkers only, too, and inside functions."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = module.split(".")
            above = above[: len(above) - node.level + is_package] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            inner = {f"{source}.{alias.name}" for alias in node.names}
            found |= inner & MODULES or {source}
    return found & MODULES


@cache
def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    trees = trees_of_files().items()
    return {name_of(path): imported(tree, name_of(path), is_package=path.name == "__init__.py") for path, tree in trees}


def test_every_way_to_import_counts() -> None:
    code = """
from .errors import JoinError
from . import arguments
import join.batch
if TYPE_CHECKING:
    import join.context
else:
    import join.report
"""
    found = imported(ast.parse(code), "join.block", is_package=False)
    assert found == {"join.errors", "join.arguments", "join.batch", "join.context", "join.report"}
    assert imported(ast.parse("from .errors import JoinError"), "join", is_package=True) == {"join.errors"}


def circle_through(graph: dict[str, set[str]], start: str) -> list[str]:
    """A way from ``start`` back to itself; empty if there is none."""
    ways, seen = [[start]], set[str]()
    while ways:
        way = ways.pop()
        for each in graph.get(way[-1], set()):
            if each == start:
                return [*way, each]
            if each not in seen:
                seen.add(each)
                ways.append([*way, each])
    return []


def test_no_module_imports_itself_by_a_circle() -> None:
    assert [circle for module in sorted(MODULES) if (circle := circle_through(graph(), module))] == []


FLOORS = ["join.collectives", "join", "joinables", "joinables.trainer"]


def floor_of(module: str) -> int:
    """What is on one floor of the house imports only what is on it or below."""
    matching = [floor for floor in FLOORS if f"{module}.".startswith(f"{floor}.")]
    return FLOORS.index(max(matching, key=len))


def test_imports_run_downward() -> None:
    pairs = [(module, each) for module in sorted(MODULES) for each in sorted(graph()[module])]
    assert [(module, each) for module, each in pairs if floor_of(each) > floor_of(module)] == []


@cache
def ours() -> set[str]:
    """The names that the packages define, set or delete."""
    found: set[str] = set()
    for tree in trees_of_files().values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
                found.add(node.attr)
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


OF_TORCH = {
    name
    for each in (
        torch.nn.Module(),
        torch.ones(1),
        torch.nn.parallel.DistributedDataParallel,
        torch.optim.Optimizer,
        torch.optim.lr_scheduler.LRScheduler,
        torch.distributed,
        torch.distributed.ProcessGroup,
        torch.distributed.Reducer,
        torch.distributed.algorithms.Join,
        torch.amp.GradScaler("cpu"),
        torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1))),
        torch.utils.data.BatchSampler,
        torch._C,
    )
    for name in dir(each)
    if is_private(name)
}
OF_PYTHON = {name for each in (os, sys, atexit, NamedTuple("Tuple", [])) for name in dir(each)}
OF_FRAMEWORKS = {
    # torchmetrics', which takes seconds to import.
    "joinables/metrics": {"_computed", "_defaults", "_is_synced", "_reductions", "_update_count", "_wrap_compute"},
}
"""The private names that a folder uses of what is neither torch's nor ours."""


def private_names(tree: ast.AST) -> Iterator[tuple[str, str, ast.AST]]:
    """Each private attribute that is used, by a dot or by its name as a string, and what it is one of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield ast.unparse(node.value), node.attr, node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            where, what = node.args[:2]
            if isinstance(what, ast.Constant) and is_private(str(what.value)):
                yield ast.unparse(where), str(what.value), node
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            of, name = ast.unparse(node.value), str(node.slice.value)
            if of.startswith("vars(") and is_private(name):
                yield of[5:-1], name, node


def listed_names(path: Path) -> set[str]:
    """The private names of a framework, which the docstring of its integration lists."""
    folder = ROOT / "joinables" / "integrations"
    if not path.is_relative_to(folder):
        return set()
    own = [each for each in FILES if each == path or (path.parent != folder and each.parent == path.parent)]
    docstrings = [ast.get_docstring(trees_of_files()[each]) or "" for each in own]
    lists = [names for text in docstrings for names in re.findall(r"^Private names of [^:]+:([^.]+)\.", text, re.M)]
    return set(re.findall(r"``(_\w+)``", " ".join(lists)))


def wrong_names(tree: ast.AST, known: set[str]) -> list[str]:
    """The private names of torch in a module, and others that are neither ours nor ``known``."""
    found = [
        f"line {getattr(node, 'lineno', 0)}: {ast.unparse(node)}"
        for where, name, node in private_names(tree)
        if name not in known and (name not in ours() or (name in OF_TORCH and where not in ("self", "cls", "super()")))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        for first, *parts in (module.split(".") for module in modules):
            if first == "torch" and any(map(is_private, parts)):
                found.append(f"import of {'.'.join([first, *parts])}")
    return found


def test_private_names_of_torch_live_in_one_room() -> None:
    for path in FILES:
        if any(path.is_relative_to(room) for room in PRIVATE_ROOMS):
            continue
        folder = path.relative_to(ROOT).as_posix()
        known = OF_PYTHON.union(*(names for place, names in OF_FRAMEWORKS.items() if folder.startswith(place)))
        known |= listed_names(path)
        assert wrong_names(trees_of_files()[path], known) == [], path


INTEGRATIONS = {
    "lightning": ("joinables/integrations/lightning/names.py", ["lightning.pytorch", "lightning.fabric"]),
    "accelerate": ("joinables/integrations/accelerate.py", ["accelerate"]),
    "transformers": ("joinables/integrations/transformers.py", ["transformers.trainer", "accelerate"]),
}
"""The file of an integration that lists private names, and where its framework defines them."""
SAME = {
    "_batches",
    "_even_batches",
    "_loader",
    "_op",
    "_set_sync_gradients",
    "_size",
    "_steps",
    "_strategy",
    "_trainer",
}
"""Names that ours and a framework's objects have, each for itself."""


def words_of(path: Path) -> set[str]:
    """The private names in a file, in whatever place."""
    return set(re.findall(r"\b_[a-zA-Z]\w+", path.read_text()))


@pytest.mark.parametrize("name", INTEGRATIONS)
def test_private_names_of_a_framework_are_listed(name: str) -> None:
    """Those that an integration reads, replaces or defines, and no others; in the oldest version and in the newest."""
    file, places = INTEGRATIONS[name]
    theirs: set[str] = set()
    for place in places:
        pytest.importorskip(place.partition(".")[0], reason=f"needs the extra {name}: make test-frameworks")
        spec = find_spec(place)
        assert spec is not None and spec.origin is not None
        origin = Path(spec.origin)
        for path in origin.parent.rglob("*.py") if spec.submodule_search_locations else [origin]:
            theirs |= words_of(path)
    listed = listed_names(ROOT / file)
    own = (ROOT / file).parent.rglob("*.py") if name == "lightning" else [ROOT / file]
    used = set[str]().union(*(names_in(trees_of_files()[path]) for path in own))
    assert used & theirs - SAME == listed & theirs
    assert listed - theirs <= {
        "_init_training_state",
        "_maybe_log_save_evaluate",
        "_run_epoch",
        "_track_num_input_tokens",
    }


def names_in(tree: ast.AST) -> set[str]:
    """The private names that a module uses or defines, also as strings."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"_[a-zA-Z]\w+", name)}


def test_versions_have_the_bounds_of_the_extras() -> None:
    text = (ROOT / "setup.cfg").read_text()
    for name, bounds in VERSIONS.items():
        oldest, above = (".".join(map(str, bound)) for bound in bounds)
        assert f"\n    {name}>={oldest},<{above}\n" in text, name


def test_a_version_that_was_not_tried_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("fake")
    monkeypatch.setitem(sys.modules, "fake", module)
    for version in ("2.4.1", "2.7.0", "3.0"):
        module.__version__ = version
        with pytest.raises(ImportError, match=rf"not support lightning {version}.* 'lightning>=2\.5,<2\.7'\. \[J128\]"):
            framework("lightning", "fake")
    for version in ("2.5.0rc1", "2.6.6"):
        module.__version__ = version
        assert framework("lightning", "fake") is module


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo as dynamo",
        "from torch import _C",
        "from torch._utils import ExceptionWrapper",
        "module._buffers.clear()",
        'getattr(module, "_backward_hooks")',
        'vars(module)["_parameters"]',
        "torch._C.f()",
        "ddp._module_parameters",
    ],
)
def test_private_names_of_torch_are_found(code: str) -> None:
    assert wrong_names(ast.parse(code), OF_PYTHON)


def makes_tensors(tree: ast.AST) -> Iterator[ast.Call]:
    """The calls that put a tensor on the default device, which ``torch.set_default_device`` may have changed."""
    makers = {f"torch.{maker.__name__}" for maker in _device_constructors()}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in makers:
            continue
        if not any(keyword.arg in ("device", None) for keyword in node.keywords):
            yield node


def test_tensors_name_their_device() -> None:
    calls = [(path, call) for path in FILES for call in makes_tensors(trees_of_files()[path])]
    assert [f"{path}:{call.lineno}: {ast.unparse(call)}" for path, call in calls] == []


def test_tensors_without_a_device_are_found() -> None:
    code = "torch.zeros(1)\ntorch.zeros(1, device=place)\ntorch.tensor(1)\ntorch.zeros_like(x)\nself.zeros(1)"
    assert [call.lineno for call in makes_tensors(ast.parse(code))] == [1, 3]


def imported_tests(tree: ast.AST) -> list[str]:
    """The test files of ours, or what is in them, that a module imports, wherever in it."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            source = ".".join([*(["tests"] if node.level else []), *([node.module] if node.module else [])])
            names += [f"{source}.{alias.name}" for alias in node.names]
    return [name for name in names if name.startswith("tests.") and ".test_" in name]


@in_test_all
def test_a_test_stands_alone() -> None:
    """What several need is in a module beside them."""
    tests = (ROOT / "tests").rglob("*.py")
    assert {name_of(path): names for path in tests if (names := imported_tests(ast.parse(path.read_text())))} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import tests.join.test_batch",
        "from tests.join.test_batch import batches",
        "def test() -> None:\n    from tests.join import counter, test_batch",
        "from . import test_batch",
        "from .test_batch import batches",
    ],
)
def test_test_files_that_are_imported_are_found(code: str) -> None:
    assert len(imported_tests(ast.parse(code))) == 1
    assert imported_tests(ast.parse(code.replace("test_batch", "counter"))) == []
