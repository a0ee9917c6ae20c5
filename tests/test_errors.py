"""Each error text has a code and a fix, in full sentences, and the page of errors is generated from the code."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import pytest

from docs.errors import EXAMPLES, HEIRS, KINDS, PAGE, Text, page, texts
from join import Join


@cache
def all_texts() -> tuple[list[Text], Counter[str]]:
    """All texts, and how many have each code."""
    found = list(texts())
    return found, Counter(code for text in found for code in text.codes)


BAD_FORMS = {
    r"; ": "write a full stop instead of the semicolon",
    r"\b[Aa]n? \*": "write 'an object of type', since the article depends on the name",
    r"\bmust\b": "say what the value is, not what it should be",
    r"\belse\b": "write 'otherwise', or a sentence that begins with 'If'",
    r"\bleave (it|that|them) out\b": "say 'Remove ... from ...'",
    r"\bfor ever\b": "write 'without limit' or 'forever'",
}


def test_each_text_has_a_code_of_its_own_and_a_fix() -> None:
    found, codes = all_texts()
    free = int(max(*codes, *HEIRS).removeprefix("J")) + 1
    for text in found:
        assert len(text.codes) == 1, f"end it with [J{free:03d}]: {text.words}"
        assert codes[text.codes[0]] == 1, f"[{text.codes[0]}] belongs to another text too. Take [J{free:03d}]"
        assert bool(text.kind) != (text.codes[0] in KINDS), f"KINDS in docs/errors.py lacks its class: {text.words}"
        assert len(text.sentences) > 1, f"say what to do, in a second sentence or in a comment above: {text.words}"
        assert re.search(r"[.?] \[J\d{3}\]", text.words), f"end the last sentence with a full stop: {text.words}"
        for form, hint in BAD_FORMS.items():
            assert not re.search(form, " ".join(text.sentences)), f"{hint}: {text.words}"


def test_the_page_is_generated_from_the_code() -> None:
    assert PAGE.read_text() == page(), "run python -m docs.errors"


def test_a_code_of_an_earlier_version_leads_to_one_of_now() -> None:
    codes = all_texts()[1].keys()
    assert not HEIRS.keys() & codes and set(HEIRS.values()) <= codes


@pytest.mark.parametrize("code", EXAMPLES)
def test_an_example_is_code_for_a_known_error(code: str) -> None:
    compile(EXAMPLES[code], code, "exec")
    assert code in all_texts()[1] and f"[{code}]" in EXAMPLES[code] and "# works" in EXAMPLES[code]


def test_an_error_is_on_the_page_as_it_is_raised() -> None:
    with pytest.raises(ValueError, match=r"Join\(\[\]\)") as caught:
        Join([])
    (text,) = [text for text in all_texts()[0] for code in text.codes if f"[{code}]" in str(caught.value)]
    assert (text.kind, text.path.name) == ("ValueError", "arguments.py")
    assert str(caught.value) == text.words
    happened, *others = text.sentences
    assert happened.startswith("Join([]) requires at least one") and "process_group=None" in " ".join(others)
    assert f"### {text.codes[0]}\n\n`ValueError`, `join/arguments.py`\n\n`` {happened} ``\n\n" in page()
