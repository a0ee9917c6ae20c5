"""Docstrings as Markdown: an extension of griffe, which reads them for the reference."""

from __future__ import annotations

import re
from typing import Any

import griffe  # pyright: ignore[reportMissingImports]

ROLE = re.compile(r":(?:class|func|meth|mod|attr|data|exc|obj):`~?\.?([^`]+)`")


class AsMarkdown(griffe.Extension):
    """Takes the roles of Sphinx out, and the second colon before what is indented."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            told = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = re.sub(r"::$", ":", told, flags=re.MULTILINE)
