"""How the house is kept: sizes, which way imports run, private names of torch, what the tour's pictures show."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import join

ROOT = Path(join.__file__).parent.parent
FILES = sorted(path for package in ("join", "joinables") for path in (ROOT / package).rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in FILES}
PRIVATE_ROOMS = (
    ROOT / "joinables" / "_torch",
    ROOT / "join" / "collectives" / "_torch_private.py",
    ROOT / "joinables" / "integrations" / "lightning" / "names.py",
)

LINES_OF_A_FILE = 400
LINES_OF_A_FUNCTION = 60
ATTRIBUTES_OF_A_CLASS = 20


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


PATHS = {name_of(path): path for path in FILES}
MODULES = set(PATHS)


def running(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that run: not what is for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from running(child)


def imported(path: Path) -> set[str]:
    """The modules of ours that a module imports."""
    found: set[str] = set()
    for node in running(TREES[path]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & MODULES or {node.module}
    return found & MODULES


GRAPH = {name_of(path): imported(path) for path in FILES}


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


@pytest.mark.parametrize("module", sorted(MODULES))
def test_no_module_imports_itself_by_a_circle(module: str) -> None:
    assert circle_through(GRAPH, module) == []


FLOORS = ["join.collectives", "join", "joinables", "joinables.trainer"]


def floor_of(module: str) -> int:
    """What is on one floor of the house imports only what is on it or below."""
    matching = [floor for floor in FLOORS if f"{module}.".startswith(f"{floor}.")]
    return FLOORS.index(max(matching, key=len))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_imports_run_downward(module: str) -> None:
    assert [each for each in GRAPH[module] if floor_of(each) > floor_of(module)] == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sizes(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LINES_OF_A_FILE
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < LINES_OF_A_FUNCTION, node.name
        if isinstance(node, ast.ClassDef):
            assert len(attributes_set(node, path)) <= ATTRIBUTES_OF_A_CLASS, node.name


def attributes_set(node: ast.ClassDef, path: Path) -> set[str]:
    """The attributes that a class and its base classes of ours set on its objects."""
    found = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
        if isinstance(each.value, ast.Name) and each.value.id == "self"
    }
    for base in node.bases:
        for definition, where in classes_called(ast.unparse(base).partition("[")[0], path):
            found |= attributes_set(definition, where)
    return found


def classes_called(name: str, path: Path) -> Iterator[tuple[ast.ClassDef, Path]]:
    """The class of ours that a module calls so, defined there or imported; none if the name is of something else."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.ClassDef) and node.name == name:
            yield node, path
        elif isinstance(node, ast.ImportFrom) and node.module in PATHS:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    yield from classes_called(alias.name, PATHS[node.module])


def test_attributes_of_base_classes_count() -> None:
    path = PATHS["joinables.trainer.loops.collective_calls"]
    [(call, where)] = classes_called("CollectiveCall", path)
    assert where == path
    assert attributes_set(call, path) >= {"_shadow", "_function", "_group"}  # each by a class in another file
    assert list(classes_called("Join", path))  # imported from a package that has it from a module
    assert not list(classes_called("TypeVar", path))


def names_of_ours() -> set[str]:
    """The names that the packages define or set."""
    found: set[str] = set()
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
    return found


OURS = names_of_ours()
OF_OTHERS = {
    "_exit",
    "_run_exitfuncs",
    "_defaults",
    "_reductions",
    "_is_synced",
    "_wrap_compute",
    "_was",
    "_add_dataloader",  # Accelerate's
    "_dataloaders",
    "_remove_dataloader",
    "_get_num_items_in_batch",  # Transformers'
}  # not torch's


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_private_names_of_torch_live_in_one_room(path: Path) -> None:
    if any(path.is_relative_to(room) for room in PRIVATE_ROOMS):
        return
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            assert node.attr in OURS | OF_OTHERS, f"line {node.lineno}: {ast.unparse(node)}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            assert not any(map(is_private, parts)), f"line {node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("picture", sorted((ROOT / "docs").glob("*.svg")), ids=lambda path: path.stem)
def test_pictures_show_functions_that_exist(picture: Path) -> None:
    """Else ``make pictures`` draws them anew."""
    functions = {
        f"{name_of(path).rpartition('.')[2]}.{node.name}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    }
    shown = set(re.findall(r">(\w+\.\w+)</text>", picture.read_text()))
    assert shown
    assert shown - functions == set()
