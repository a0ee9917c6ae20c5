"""Find constructions that make a reader read twice: ``python -m docs.prose [PATH...]`` prints them, and counts them.

It reads Markdown outside code, and the docstrings, comments and error texts of Python files. Each rule has a name and
the fix. About one finding in seven is fine where it stands, so ``make check`` allows :data:`CEILING` of them in 1,000
words. Lower the ceiling when you have removed some; nothing raises it.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
TEXTS = "README.md", "CONTRIBUTING.md", "docs", "join", "joinables", "tutorials", "recipes"
GENERATED = {"errors.md"}
CEILING = 1.2  # findings in 1,000 words
WORDS_OF_A_SENTENCE, LINKS_OF_A_SENTENCE = 35, 3  # the most words; the colons and semicolons that make a chain

_DOCSTRING = "\x02"  # stands before the first line of a docstring
_PRONOUNS = "it|they|this|that|others?|all|each|every|ranks?|the|a|an|no|you|users?|else|torch|DDP|CODE"
_VERBS = "is|was|are|has|had|have|does|do|goes|comes|came|can|cannot"
_SEE = r"(?<!say )(?<!says )(?<!know )(?<!knows )(?<!see )(?<!sees )(?<!exactly )(?<!shows )"
_CONDITIONS = (
    "that|there|no|nothing|nobody|some|several|ranks|all|gradients|it is|it was|one|another|only|both|batches|each"
    "|possible|needed|weights|others|a rank|buffers|headers|they"
)
_QUANTITIES = "numbers?|lengths?|batch sizes?|torch|tensors|shapes?|orders?|values?|place"
_AFTER_ALSO = (
    "where|in|on|with|without|under|for|no|when|if|a|the|that|those|outside|after|before|from|over|to|by|inside|at|of"
    "|what|one|while|as|between"
)

RULES = {
    "what-noun": (rf"{_SEE}\bwhat (?:{_VERBS}|{_PRONOUNS})\b", "name the thing"),
    "what-docstring": (
        rf"^{_DOCSTRING}(?:What|Who|How(?! (?:many|much|long|often))|Where|Which)\b",
        "begin with an imperative for a function, with a noun for a class",
    ),
    "that-of": (r"\b(?:that|those) of\b|\b(?:that|this) one's\b", "repeat the noun"),
    "prep-which": (r"\b(?:of|to|from|for|by|after|over|among|at|with|through) (?:which|what)\b", "a second sentence"),
    "where-if": (rf"(?:^|[.;:,(] ?)[Ww]here (?:{_CONDITIONS})\b", "if"),
    "person": (
        r"\b(?:[Nn]obody|[Ee]verybody|[Ss]omebody|[Ww]ho(?:m)?ever)\b|(?:^|[.;:] )Who (?!did|waits|waited|can)\b"
        r"|\b(?:that|rank|it) alone (?!is|are|and|or|in)[a-z]+",
        "a rank, a caller, the user",
    ),
    "archaic": (
        r"\b(?:anew|for ever|mend(?:s|ed)?|amid|mostly|at the latest|all the same|in vain|no say|way out)\b"
        r"|\bgone through\b|\b[Ss]ome (?:\d+|CODE|seconds|minutes|gigabytes)|nothing to say|without a word",
        "again, fix, about",
    ),
    "stock-verb": (
        r"\b(?:go|goes|going|went|gone) on\b|\bunder way\b|\b(?:is|are|was|were) over\b(?! (?:all|the|its|each|samples"
        r"|tokens|a)\b)",
        "continue, resume, current, has ended",
    ),
    "is-no": (r"(?<![Tt]here )\b(?:is|are|was|were) no (?!longer|more|such|different|CODE)[a-z]+", "is not a"),
    "quantity": (
        rf"(?<!no )(?<!any )(?<!some )(?<!all )(?<!each )\b(?:[Oo]ther|[Aa]nother) (?:{_QUANTITIES})\b"
        r"|\bof another kind\b"
        r"|(?<!times )\bas (?:many|often)(?=[.,;:)]|$| (?:on|as there|ranks|at|it|makes)\b)",
        "a different number",
    ),
    "told": (r"\btold\b|\btells? (?:of|all|the others|them|it|how|who|whether)\b", "say, receive, show"),
    "of-theirs": (
        r"\bof (?:theirs|ours|torchmetrics|gloo|transformers)\b(?!\.)"
        r"|\bof \w+'s(?=[,.;:)]| (?:that|which|is|are|drops)\b)",
        "a gloo thread",
    ),
    "calque": (
        r"\b(?:hand(?:s|ed|ing)?|deal(?:s|t|ing)?) (?:it |them )?out\b|\bin (?:the|its|their|whose) place\b"
        r"|\bcomes? home\b|\bst(?:and|ands|ood) (?:in )?for\b|\btak(?:es|en|e|ing) (?:\w+ )?over\b",
        "yield, distribute, instead, wrap, load",
    ),
    "give-pass": (
        r"(?:^|[;:.,] |\b(?:or|and|then) )[Gg]ive\b(?! (?:up|out|way)\b)|\b(?:is|are|was|were|be|as|not) given\b"
        r"|\bgiven to\b",
        "pass",
    ),
    "leave-out": (r"\b[Ll](?:eaves?|eft|eaving) (?:\w+ ){0,2}out\b(?! of the next)", "remove, skip"),
    "one-that": (
        r"(?:^|[.;:,] )(?:[Oo]ne|[Aa]nother|[Tt]hat) (?:that|with|without|whose|which)\b",
        "repeat the noun",
    ),
    "is-there": (
        r"\b(?:is|are|was|were) there\b(?! (?:is|are|a|an|any|no)\b)|\bthat there (?:is|are|was|were)\b",
        "exists",
    ),
    "also-else": (rf"[;,:] else\b|\b[Aa]lso (?:{_AFTER_ALSO})\b", "even if, otherwise"),
    "come": (
        r"\b(?:not|never|also) comes?\b"
        r"|\bcom(?:e|es|ing) (?:to (?:a|the|it|its|them|theirs|that|where|each)\b|amid|by\b)",
        "reach, arrive",
    ),
}
"""For each rule: what it looks for, and what to write instead."""

_PATTERNS = {name: re.compile(pattern) for name, (pattern, _) in RULES.items()}
_PARENTHESES = re.compile(r"\([^()]*\s\([^()]*\)[^()]*\)|\([^()]*;[^()]*\)|\((?:[^\s()]+ ){14,}[^()]*\)")
_EXAMPLE = re.compile(r"::\n\n(?:    .*(?:\n|$)|\n)+")  # in a docstring
_BEGINS_PARAGRAPH = re.compile(r"[-*] |\d+\. |#+ |\||[*\w]+: \S")
_NOT_PROSE = re.compile(r"```|!|\|[-: ]+\||>>>")
_DIRECTIVE = re.compile(r"#:? ?(--|pyright|noqa|type:|ruff)")


class Finding(NamedTuple):
    """A construction that a rule looks for.

    Attributes:
        place: the file, and the line in which the paragraph begins.
        rule: the name of the rule.
        text: the words around it.
    """

    place: str
    rule: str
    text: str


def paragraphs(text: str, line: int = 1, mark: str = "") -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each paragraph, list item, argument or table cell outside code."""
    lines, start, in_code = list[str](), line, False
    for number, raw in enumerate([*text.split("\n"), ""], line):
        words = raw.strip()
        in_code ^= words.startswith("```")
        if lines and (not words or in_code or _BEGINS_PARAGRAPH.match(words)):
            yield start, mark + " ".join(lines)
            lines, mark = [], ""
        if not words or in_code or _NOT_PROSE.match(words):
            continue
        if words.startswith("|"):
            for cell in words.strip("|").split("|"):
                yield number, cell.strip()
        elif mark or lines or line > 1 or not raw.startswith("    "):
            start, lines = start if lines else number, [*lines, words]


def python_texts(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, error text and comment of a Python file."""
    parts: set[ast.AST] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstring = inspect.cleandoc(node.value.value)
            docstring = _EXAMPLE.sub(lambda example: "." + "\n" * example[0].count("\n"), docstring)
            yield from paragraphs(docstring, node.lineno, _DOCSTRING)
        elif isinstance(node, (ast.JoinedStr, ast.Constant)) and node not in parts:
            pieces = node.values if isinstance(node, ast.JoinedStr) else [node]
            parts.update(pieces)
            words = "".join(str(piece.value) if isinstance(piece, ast.Constant) else "CODE" for piece in pieces)
            if re.search(r" \[J\d{3}\]$", words):
                yield node.lineno, words[: -len(" [J000]")]
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not _DIRECTIVE.match(token.string):
            yield token.start[0], token.string.lstrip("#: ")


def findings_in(paragraph: str) -> Iterator[tuple[str, str]]:
    """Yield the rule and the words around it for each finding in a paragraph."""
    paragraph = re.sub(r"(:\w+:)?(``.+?``|`[^`]+`)", "CODE", paragraph)
    paragraph = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", paragraph)
    for name, pattern in _PATTERNS.items():
        for match in pattern.finditer(paragraph):
            yield name, paragraph[max(0, match.start() - 40) : match.end() + 40].strip(_DOCSTRING)
    for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z(*])", paragraph):
        if (words := len(sentence.split())) > WORDS_OF_A_SENTENCE:
            yield "long", f"({words} words) {sentence[:70]}"
        elif len(re.findall(r"[;:](?= )", sentence)) >= LINKS_OF_A_SENTENCE:
            yield "chain", sentence[:80]
        if _PARENTHESES.search(sentence):
            yield "parentheses", sentence[:80]


def examine(paths: Sequence[Path]) -> tuple[list[Finding], int]:
    """Return the findings in files and in all files below folders, and how many words were read."""
    files = [file for path in paths for file in (sorted(path.rglob("*")) if path.is_dir() else [path])]
    findings, words = list[Finding](), 0
    for file in files:
        if file.suffix not in (".md", ".py") or file.name in GENERATED:
            continue
        text = file.read_text()
        for line, paragraph in python_texts(text) if file.suffix == ".py" else paragraphs(text):
            words += len(paragraph.split())
            findings += [Finding(f"{file}:{line}", *finding) for finding in findings_in(paragraph)]
    return findings, words


def main(arguments: Sequence[str]) -> str | None:
    """Print findings; return an error text if there are too many, and nothing if there are not."""
    findings, words = examine([Path(argument) for argument in arguments] or [ROOT / name for name in TEXTS])
    share = 1000 * len(findings) / max(words, 1)
    if arguments or share > CEILING:
        for place, rule, text in findings:
            fix = RULES[rule][1] if rule in RULES else "split the sentence"
            print(f"{place}: {rule} ({fix}): {text}")
    print(
        *(f"{count:5} {rule}" for rule, count in Counter(finding.rule for finding in findings).most_common()), sep="\n"
    )
    print(f"{len(findings)} findings in {words} words: {share:.1f} in 1,000, of {CEILING} allowed")
    return "Rewrite sentences that are listed above by naming things." if share > CEILING else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
