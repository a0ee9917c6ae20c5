"""Explanation of an error by its code: ``python -m joinables explain J441``.

The texts are on the page of errors, which ``python -m docs.errors`` writes into this package, too.
"""

from __future__ import annotations

import re
from importlib.resources import files


def explain(code: str) -> str | None:
    """Return the section of the page of errors about a code, as text; ``None`` if there is none.

    An error of an earlier version is followed by the error that is raised now.
    """
    page = (files(__package__ or "joinables") / "errors.md").read_text()
    found = re.search(rf"^### {re.escape(code.upper())}\n\n.*?(?=^##+ |\Z)", page, re.MULTILINE | re.DOTALL)
    if found is None:
        return None
    text = re.sub(r"\\([_`\[\]>])", r"\1", found[0].removeprefix("### ")).replace("&lt;", "<").strip()
    heir = re.search(r"This error is \[(J\d{3})\]", text)
    return f"{text}\n\n{explain(heir[1])}" if heir else text
