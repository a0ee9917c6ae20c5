"""The finder of constructions that make a reader read twice: it sees them in texts, and not in code."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.prose import RULES, examine, findings_in, main, paragraphs, python_texts

PYTHON = '''
"""What keeps ranks in step."""

def f():
    """Return nothing::

        what is code is not read

    Nobody reads this.
    """
    raise ValueError(f"{name} is given; else it hangs [J001]")  # leave it out
'''


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("what-noun", "All that matters is what ranks hold."),
        ("that-of", "until that of the group has passed"),
        ("where-if", "Where some rank has no data, all wait."),
        ("person", "It hangs, and nobody says why."),
        ("archaic", "some 40 calls"),
        ("stock-verb", "the run under way"),
        ("leave-out", "leave it out"),
        ("also-else", "also where it was killed"),
        ("come", "a rank that does not come"),
        ("long", "word " * 36 + "end."),
        ("chain", "One: two; three; four."),
        ("parentheses", "a (b (c) d) e"),
    ],
)
def test_each_kind_is_found(rule: str, text: str) -> None:
    assert rule in [name for name, _ in findings_in(text)]


@pytest.mark.parametrize(
    "text", ["A rank that fails raises its own exception.", "Pass `what is code` to it.", "There are no hooks."]
)
def test_plain_sentences_have_none(text: str) -> None:
    assert not list(findings_in(text))


def test_code_in_markdown_is_not_read() -> None:
    text = "One.\n\n```python\nwhat is this\n```\n\n- two\n- three\n| four | five |\n| --- | --- |"
    assert [words for _, words in paragraphs(text)] == ["One.", "- two", "- three", "four", "five"]


def test_docstrings_errors_and_comments_of_python_are_read() -> None:
    rules = [name for _, words in python_texts(PYTHON) for name, _ in findings_in(words)]
    assert sorted(rules) == ["also-else", "give-pass", "leave-out", "person", "what-docstring"]


def test_too_many_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.md").write_text("Nobody goes on.")
    assert "Rewrite" in (main([str(tmp_path)]) or "")
    assert "bad.md:1: person (a rank, a caller, the user)" in capsys.readouterr().out
    (tmp_path / "bad.md").write_text("All ranks continue.")
    assert main([str(tmp_path)]) is None
    assert examine([tmp_path]) == ([], 3)


def test_each_rule_has_a_fix() -> None:
    assert all(fix for _, fix in RULES.values())
