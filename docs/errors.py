"""Write the page of all errors, from the code: ``python -m docs.errors`` writes ``docs/errors.md``.

The text of an error has a code: ``... list it [J052]``. It is written where the text is, and never changes or comes
back: people search for it. A text says what is wrong, and then the way out (``WAYS_OUT``). Where that takes more words,
a comment right above the statement says them on the page; each line of it begins with ``#:``.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
FILES = sorted(path for package in ("join", "joinables") for path in (ROOT / package).rglob("*.py"))
CODE = re.compile(r" ?\[(J\d{3})\]")
WAYS_OUT = [
    re.compile(begin) for begin in (r"(?<=[\w*)])\. (?=[A-Z])", "; ", " (?=(must|is none of|is neither) )", ": ")
]
# What nobody should see, what tells of an error that has a code, and Python's own text.
WITHOUT_CODE = {"AssertionError", "BrokenCollective", "PeerError", "RemoteTraceback", "AttributeError"}
TITLES = {
    "join": "Join",
    "join/collectives": "Collectives",
    "join/failure": "Another rank has failed, or does not come",
    "join/loop": "Loops over join.iterate",
    "join/protocol": "Ranks that do different things",
    "join/report": "The report",
    "joinables": "What is listed",
    "joinables/_torch": "The version of torch",
    "joinables/ddp": "DistributedDataParallel",
    "joinables/integrations": "Lightning, Accelerate and Transformers",
    "joinables/metrics": "Metrics",
    "joinables/trainer": "The trainer",
}
TOP = """# Errors

<!-- Written by `python -m docs.errors`, from the code. -->

The text of an error has a code, such as `[J052]`. Search this page for yours: there is the text, with `<what differs>`
from one error to the next, and after the arrow the way out.

Two kinds of error have no code of their own. `PeerError` is what the other ranks raise when one has failed: it tells of
that one's error. Look for its code, or mend what it says, then restart the processes from a checkpoint. And
`EarlyTerminationError`, which `throw_on_early_termination=True` asks for, has torch's own texts: a rank has run out of
inputs.
"""


@dataclass(frozen=True)
class Text:
    """The text of an error."""

    path: Path
    line: int
    kind: str
    """The class of the error; empty if the text is put together before that is made."""
    words: str
    """What it is filled with stands between asterisks."""
    comment: str
    """The way out, if the text does not have it."""

    @property
    def codes(self) -> list[str]:
        return CODE.findall(self.words)

    @cached_property
    def parts(self) -> tuple[str, str]:
        """What is wrong, and the way out."""
        words = CODE.sub("", self.words)
        if self.comment:
            return words, self.comment
        found = next(filter(None, (begin.search(words) for begin in WAYS_OUT)), None)
        return (words[: found.start()], words[found.end() :]) if found else (words, "")

    @property
    def room(self) -> str:
        """The one of ``TITLES`` that the file is, or is in."""
        folder = self.path.relative_to(ROOT).with_suffix("").as_posix()
        return max((room for room in TITLES if f"{folder}/".startswith(f"{room}/")), key=len)


def texts() -> Iterator[Text]:
    """The texts of all errors: those with a code, and those that should have one."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    kinds = error_classes(trees.values())
    for path, tree in trees.items():
        lines, constants = path.read_text().splitlines(), dict(constants_of(tree))
        for statement, node, kind in strings(tree, kinds):
            words = written(node, constants)
            own_words = re.sub(r"\*[^*]*\*", "", written(node, {}))
            if CODE.search(words) or (kind and any(map(str.isalpha, own_words))):
                yield Text(path, node.lineno, kind, words, comment_above(lines, statement))


def error_classes(trees: Iterable[ast.Module]) -> set[str]:
    """The names of all exceptions: Python's, and what the packages derive from them."""
    found = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while new := {each.name for each in classes if found.intersection(map(ast.unparse, each.bases))} - found:
        found |= new
    return found - WITHOUT_CODE


def constants_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The strings that have names in a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield ast.unparse(node.targets[0]), node.value.value


def strings(node: ast.AST, kinds: set[str], statement: int = 1, kind: str = "") -> Iterator[tuple[int, ast.expr, str]]:
    """The strings in a node: the line in which their statement begins, and the error that they are an argument of."""
    for child in ast.iter_child_nodes(node):
        begin = child.lineno if isinstance(child, ast.stmt) else statement
        if isinstance(child, ast.JoinedStr) or (isinstance(child, ast.Constant) and isinstance(child.value, str)):
            yield begin, child, kind
        elif isinstance(child, ast.Call):
            name = ast.unparse(child.func)
            yield from strings(child, kinds, begin, name if name in kinds else "")
        else:
            yield from strings(child, kinds, begin, kind)


def written(node: ast.expr, constants: Mapping[str, str]) -> str:
    """A string; what it is filled with stands between asterisks, unless that is a constant."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(each, constants) for each in node.values)
    assert isinstance(node, ast.FormattedValue)
    source = ast.unparse(node.value)
    if source.startswith("did_you_mean"):
        return ""
    return constants[source] if source in constants else f"*{in_short(node.value)}*"


def in_short(node: ast.expr) -> str:
    """What an expression is, in a word or two."""
    if isinstance(node, ast.IfExp):
        return in_short(node.orelse if isinstance(node.body, ast.Constant) else node.body)
    if isinstance(node, ast.JoinedStr):
        return " ".join(in_short(each.value) for each in node.values if isinstance(each, ast.FormattedValue))
    source = re.sub(r"(['\"]).*?\1", "", ast.unparse(node))
    if isinstance(node, ast.BinOp):
        return re.sub(r"\b(self\.)?_?", "", source)
    names = [name.strip("_") for name in re.findall(r"[A-Za-z]\w*", source) if name not in WITHOUT_MEANING]
    return names[-1].replace("_", " ") if names else "class"


WITHOUT_MEANING = "self", "join", "map", "repr", "sorted", "str", "len", "type", "name__", "qualname__", "decode", "or"


def comment_above(lines: list[str], line: int) -> str:
    """The comment above a line (from 1), if it is one for the page."""
    found: list[str] = []
    while (above := lines[line - 2 - len(found)].strip()).startswith("#: "):
        found.insert(0, above.removeprefix("#: "))
    return " ".join(found)


def page() -> str:
    """The page."""
    told = [TOP]
    for room, here in groupby(sorted(texts(), key=lambda text: (text.room, text.codes)), key=lambda text: text.room):
        told.append(f"## {TITLES[room]}\n")
        told += map(entry, here)
    return "\n".join(told)


def entry(text: Text) -> str:
    """What the page says of one error."""
    wrong, way_out = text.parts
    wrong = re.sub(r"\*([^*]*)\*", r"<\1>", wrong)
    way_out = re.sub(r"[_`\[\]]", r"\\\g<0>", way_out)
    of = f"`{text.kind}`, " if text.kind else ""
    where = text.path.relative_to(ROOT).as_posix()
    return f"### {' '.join(text.codes)}\n\n{of}`{where}`\n\n`` {wrong} ``\n\n→ {way_out}\n"


if __name__ == "__main__":
    PAGE.write_text(page())
