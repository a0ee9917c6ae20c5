"""Conversion of docstrings to Markdown: an extension of griffe, which reads them for the reference."""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?\.?([^`]+)`")


class AsMarkdown(griffe.Extension):
    """Extension that removes the roles of Sphinx, and the second colon before an indented block."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)
