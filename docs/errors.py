"""Generator of the page of all errors: ``python -m docs.errors`` writes ``docs/errors.md`` from the code.

The text of an error contains a code: ``... Add it to the list. [J052]``. The code stands where the text stands. A code
never changes and is never reused, because people search for it. The first sentence of a text says what happened; the
others say why, and what to do. A fix that needs more words is a comment right above the statement, each line of which
begins with ``#:``. It appears on the page only.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "errors.md"
COPY = ROOT / "joinables" / "errors.md"  # in the wheel, for python -m joinables explain
FILES = sorted(path for package in ("join", "joinables") for path in (ROOT / package).rglob("*.py"))
CODE = re.compile(r" ?\[(J\d{3})\]")
NEXT_SENTENCE = re.compile(r"""(?<=[\w*)\]'"`][.?])\s+(?=[A-Z*`])""")
# An internal fault, errors that repeat an error with a code, and texts that Python prescribes.
WITHOUT_CODE = {"AssertionError", "BrokenCollective", "PeerError", "RemoteTraceback", "AttributeError"}
KINDS = {
    "J043": ["RuntimeError"],
    "J057": ["AttributeError"],
    "J060": ["JoinTimeoutError"],
    "J061": ["JoinTimeoutError"],
    "J064": ["PeerError"],
    "J082": ["JoinError"],
    "J090": ["JoinError"],
    "J107": ["ValueError", "JoinError"],
    "J113": ["ProtocolError"],
    "J214": ["WorkerDied"],
    "J215": ["WorkerDied"],
    "J444": ["ProtocolError"],
    "J525": ["JoinError"],
    "J598": ["JoinError"],
    "J599": ["JoinError"],
    "J684": ["AttributeError"],
    "J741": ["TypeError", "ValueError"],
    "J777": ["JoinError"],
    "J870": ["AttributeError"],
    "J891": ["UserWarning"],
    "J892": ["UserWarning"],
}
"""Classes of the errors whose texts are not written where the error is raised."""
TITLES = {
    "join/arguments": "Calling `Join`",
    "join/registry": "Calling `Join`",
    "join": "Entering, using and leaving a block",
    "join/agreement": "Running the same code on all ranks",
    "join/protocol": "Running the same code on all ranks",
    "join/failure": "Waiting for other ranks",
    "join/loop": "Looping over `join.iterate`",
    "joinables/dummy_forward": "Looping over `join.iterate`",
    "join/scaling": "Weighing batches and scaling losses",
    "joinables/loss_gate": "Weighing batches and scaling losses",
    "joinables": "Listing an object",
    "joinables/ddp": "Training a `DistributedDataParallel` module",
    "joinables/metrics": "Keeping metrics",
    "join/mean": "Keeping metrics",
    "joinables/over_ranks": "Keeping metrics",
    "join/transfer": "Copying state when a block ends",
    "join/report": "Reading the report",
    "joinables/testing": "Testing",
    "joinables/trainer": "Training with the trainer",
    "joinables/trainer/launch": "Launching processes",
    "joinables/processes": "Launching processes",
    "joinables/trainer/checkpoint": "Saving and resuming with the trainer",
    "joinables/trainer/files": "Saving and resuming with the trainer",
    "joinables/integrations/lightning": "Training with Lightning",
    "joinables/integrations/accelerate": "Training with Accelerate",
    "joinables/integrations/transformers": "Training with Transformers",
    "join/collectives": "Calling collectives",
    "joinables/_torch": "Installing torch",
}
"""The activity in which a user meets the errors of a file or folder, in the order of the page."""
TOP = """# Errors

<!-- Written by `python -m docs.errors`, from the code. -->

The text of an error contains a code, such as `[J052]`. Search this page for your code. Each entry has the class of the
error, the file that raises it, what happened, and what to do. A name in angle brackets, such as `<rank>`, stands for a
value that differs from one error to the next. `python -m joinables explain J052` prints one entry.

Two kinds of error have no code of their own:

- `PeerError` is raised by the ranks that did not fail. It quotes the error of the rank that failed. Look up the code of
  the quoted error, fix its cause, and restart all processes from a checkpoint. If an error quotes `[J060]` after
  `rank N failed:`, rank N only waited: the text of `[J060]` names the ranks to look at. If a rank is gone and left no
  error to quote, the code is `[J064]`.
- `EarlyTerminationError` is raised if you pass `throw_on_early_termination=True` and a rank runs out of batches. It has
  the same texts as in PyTorch.

The errors that users meet most often have an example:

"""
HEIRS = {
    **dict.fromkeys(("J006", "J008", "J019", "J071", "J465", "J680"), "J001"),
    **dict.fromkeys(("J007", "J009", "J069", "J070", "J072", "J074", "J464", "J470", "J820"), "J002"),
    **dict.fromkeys(("J054", "J469", "J563", "J686", "J685", "J735", "J780", "J795", "J821"), "J055"),
    **dict.fromkeys(("J136", "J137", "J138", "J831"), "J121"),
    **{"J118": "J128", "J129": "J291", "J133": "J126", "J526": "J461", "J602": "J521"},
    **{
        "J114": "J802",
        "J463": "J460",
        "J111": "J106",
        "J032": "J033",
        "J860": "J016",
        "J864": "J817",
        "J034": "J033",
        "J024": "J026",
        "J041": "J039",
        "J062": "J061",
        "J503": "J039",
        "J862": "J039",
        "J570": "J020",
        "J641": "J642",
        "J702": "J266",
        "J224": "J620",
        "J500": "J620",
        "J410": "J711",
        "J743": "J870",
        "J198": "J794",
    },
}
"""For the code of an error of an earlier version, the code of the error that is raised now."""
EXAMPLES = {
    "J010": """\
Join(model)  # raises [J010]: a module is not a list
Join([model])  # works
""",
    "J013": """\
Join([optimizer])  # raises [J013]: an optimizer such as Adam does not communicate
Join([model, optimizer])  # works: the DistributedDataParallel module communicates
""",
    "J018": """\
Join([model], time_out=60)  # raises [J018]
Join([model], timeout=60)  # works
""",
    "J020": """\
Join([model, optimizer] if rank == 0 else [model])  # raises [J020] on entering the block
Join([model, optimizer])  # works: the same list on all ranks
""",
    "J022": """\
with Join([], process_group=None):  # raises [J022] on several processes: there is no default process group yet
    evaluate()

torch.distributed.init_process_group("gloo")  # works if called first
""",
    "J051": """\
with Join([model, optimizer]) as join:
    train()
    print(join.report)  # raises [J051]: the block has not ended

with Join([model, optimizer]) as join:
    train()
print(join.report)  # works
""",
    "J060": """\
with Join([model, optimizer], timeout=60) as join:
    for x, y in loader:
        train_step(x, y)
        torch.distributed.barrier()  # leads to [J060]: a rank that is out of data never calls it

with Join([model, optimizer], timeout=60) as join:
    for x, y in join.iterate(loader):  # works: all ranks run the loop body equally often
        train_step(x, y)
        torch.distributed.barrier()
""",
    "J064": """\
rows = list(dataset)  # the kernel kills the process for lack of memory; the other ranks raise [J064]
rows = iter(dataset)  # works: reads one row at a time
""",
    "J093": """\
for x, y in join.iterate(loader):
    if len(x) < 8:
        continue  # raises [J093]: this rank skips a backward that other ranks run
    train_step(x, y)

for x, y in join.iterate(loader, weigh=lambda batch: len(batch[0]) if len(batch[0]) >= 8 else 0):
    join.scale(loss_of(x, y)).backward()  # works: a batch of weight 0 counts for nothing
""",
    "J096": """\
Join([model, {"steps": 0}])  # raises [J096]: a dict has neither hooks nor state_dict
Join([model, ema])  # works if ema has state_dict and load_state_dict
""",
}
"""For the errors that users meet most often, code that raises the error and code that does not."""


@dataclass(frozen=True)
class Text:
    """The text of an error."""

    path: Path
    line: int
    kind: str
    """The class of the error; empty if the text is not an argument of it."""
    words: str
    """The text; the names of inserted values stand between asterisks."""
    comment: str
    """The comment above the statement that is written for the page."""

    @property
    def codes(self) -> list[str]:
        return CODE.findall(self.words)

    @property
    def kinds(self) -> list[str]:
        """The classes of the errors that have this text."""
        return [self.kind] if self.kind else KINDS.get("".join(self.codes), [])

    @cached_property
    def sentences(self) -> list[str]:
        """The sentences of the text and of the comment, without the code."""
        text = CODE.sub("", self.words)
        return NEXT_SENTENCE.split(text) + (NEXT_SENTENCE.split(self.comment) if self.comment else [])

    @property
    def title(self) -> str:
        """The title in ``TITLES`` of the longest matching path."""
        own = self.path.relative_to(ROOT).with_suffix("").as_posix()
        return TITLES[max((path for path in TITLES if f"{own}/".startswith(f"{path}/")), key=len)]


def texts() -> Iterator[Text]:
    """Yield the texts of all errors that have a code or should have one."""
    trees = {path: ast.parse(path.read_text()) for path in FILES}
    kinds = error_classes(trees.values())
    shared = dict(chain.from_iterable(map(constants_of, trees.values())))  # one module may import another's
    for path, tree in trees.items():
        lines, constants = path.read_text().splitlines(), shared | dict(constants_of(tree))
        for statement, node, kind in strings(tree, kinds):
            words = written(node, constants)
            own_words = re.sub(r"\*[^*]*\*", "", written(node, {}))
            if CODE.search(words) or (kind and any(map(str.isalpha, own_words))):
                yield Text(path, node.lineno, kind, words, comment_above(lines, statement))


def error_classes(trees: Iterable[ast.Module]) -> set[str]:
    """Return the names of all exceptions: the built-in ones, and the classes that the packages derive from them."""
    names = {name for name, value in vars(builtins).items() if isinstance(value, type) and issubclass(value, Exception)}
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    while new := {node.name for node in classes if names.intersection(map(ast.unparse, node.bases))} - names:
        names |= new
    return names - WITHOUT_CODE


def constants_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and value of each string constant of a module."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield ast.unparse(node.targets[0]), node.value.value


def strings(node: ast.AST, kinds: set[str], statement: int = 1, kind: str = "") -> Iterator[tuple[int, ast.expr, str]]:
    """Yield each string in a node, between the line of its statement and the error class that it is an argument of."""
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
    """Return a string with the names of inserted values between asterisks, and with constants inserted."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part, constants) for part in node.values)
    assert isinstance(node, ast.FormattedValue)
    source = ast.unparse(node.value)
    if source == "hint":
        return ""
    return constants[source] if source in constants else f"*{in_short(node.value)}*"


def in_short(node: ast.expr) -> str:
    """Return a name of a word or two for the value of an expression."""
    if isinstance(node, ast.IfExp):
        return in_short(node.orelse if isinstance(node.body, ast.Constant) else node.body)
    if isinstance(node, ast.JoinedStr):
        return " ".join(in_short(part.value) for part in node.values if isinstance(part, ast.FormattedValue))
    source = re.sub(r"(['\"]).*?\1", "", ast.unparse(node))
    if isinstance(node, ast.BinOp):
        return re.sub(r"\b(self\.)?_?", "", source)
    names = [name.strip("_") for name in re.findall(r"[A-Za-z]\w*", source) if name not in WITHOUT_MEANING]
    return names[-1].replace("_", " ") if names else "class"


WITHOUT_MEANING = "self", "join", "map", "repr", "sorted", "str", "len", "type", "name__", "qualname__", "decode", "or"


def comment_above(lines: list[str], line: int) -> str:
    """Return the comment for the page that stands above a line, which is counted from 1; "" if there is none."""
    comment: list[str] = []
    while (above := lines[line - 2 - len(comment)].strip()).startswith("#: "):
        comment.insert(0, above.removeprefix("#: "))
    return " ".join(comment)


def page() -> str:
    """Return the page."""
    order = list(dict.fromkeys(TITLES.values()))
    every = sorted(texts(), key=lambda text: (order.index(text.title), text.codes))
    first = {text.codes[0]: text.sentences[0] for text in every if text.codes}
    parts = [TOP + "\n".join(f"- [{code}](#{code.lower()}): {prose(first[code])}" for code in EXAMPLES) + "\n"]
    for title, group in groupby(every, key=lambda text: text.title):
        parts += [f"## {title}\n", *map(entry, group)]
    parts.append("## Codes of earlier versions\n")
    parts += [f"### {code}\n\nThis error is [{heir}](#{heir.lower()}) now.\n" for code, heir in sorted(HEIRS.items())]
    return "\n".join(parts)


def entry(text: Text) -> str:
    """Return the page's entry for one error."""
    happened, *others = text.sentences
    source = f"{' or '.join(f'`{kind}`' for kind in text.kinds)}, `{text.path.relative_to(ROOT).as_posix()}`"
    parts = [f"### {' '.join(text.codes)}", source, f"`` {placeholders(happened)} ``", prose(" ".join(others))]
    parts += [f"```python\n{EXAMPLES[code]}```" for code in text.codes if code in EXAMPLES]
    return "\n\n".join(parts) + "\n"


def placeholders(text: str) -> str:
    """Return a text with the names of inserted values in angle brackets."""
    return re.sub(r"\*([^*]*)\*", r"<\1>", text)


def prose(text: str) -> str:
    """Return a text as Markdown that shows its characters as they are."""
    # Python-Markdown does not know a backslash before "<".
    return re.sub(r"[_`\[\]>]", r"\\\g<0>", placeholders(text).replace("<", "&lt;"))


if __name__ == "__main__":
    for place in (PAGE, COPY):
        place.write_text(page())
