"""The texts of errors: each has a code and says the way out, and the page of all of them is what the code says."""

from __future__ import annotations

from collections import Counter

import pytest

from docs.errors import PAGE, ROOT, Text, page, texts
from join import Join

TEXTS = list(texts())
CODES = Counter(code for text in TEXTS for code in text.codes)


def name_of(text: Text) -> str:
    return f"{text.path.relative_to(ROOT)}:{text.line}"


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_a_text_has_a_code_of_its_own_and_a_way_out(text: Text) -> None:
    free = int(max(CODES).removeprefix("J")) + 1
    assert len(text.codes) == 1, f"end it with [J{free:03d}]: {text.words}"
    assert CODES[text.codes[0]] == 1, f"[{text.codes[0]}] is of another text, too: take [J{free:03d}]"
    wrong, way_out = text.parts
    assert wrong and way_out, f"say what to do, after a semicolon or in a comment above: {text.words}"


def test_the_page_is_that_of_the_code() -> None:
    assert PAGE.read_text() == page(), "run python -m docs.errors"


def test_what_is_raised_is_on_the_page() -> None:
    with pytest.raises(ValueError, match="joinables=") as caught:
        Join([])
    (text,) = [text for text in TEXTS for code in text.codes if f"[{code}]" in str(caught.value)]
    assert (text.kind, text.path.name) == ("ValueError", "arguments.py")
    assert str(caught.value) == text.words
    wrong, way_out = text.parts
    assert f"### {text.codes[0]}\n\n`ValueError`, `join/arguments.py`\n\n`` {wrong} ``\n\n→ " in page()
    assert wrong.startswith("joinables=[] is empty") and "process_group=None" in way_out
