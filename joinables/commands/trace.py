"""``python -m joinables trace run.json``: makes a page, and a file for Perfetto, of what ``join.trace`` has written."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from join.files import whole_file
from joinables.commands.page import page_of
from joinables.commands.parts import TraceError, read
from joinables.commands.perfetto import perfetto_of


def add_to(commands: Any) -> None:
    """Add the command to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "trace",
        help="make a page of what join.trace has written",
        description=(
            "Reads the files of all ranks (run.rank0.json, ... for run.json) and writes two beside them: run.html, one"
            " page with the timeline of the ranks, who waits for whom, and how long headers take; and"
            " run.perfetto.json for ui.perfetto.dev or chrome://tracing."
        ),
    )
    parser.add_argument("path", type=Path, help="what was given to join.trace, such as run.json")
    parser.add_argument("--out", type=Path, help="the page, if not run.html; the other file is put beside it")
    parser.set_defaults(act=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        run = read(options.path)
        page = options.out or run.path.with_suffix(".html")
        other = page.with_suffix(".perfetto.json")
        for path, text in ((page, page_of(run)), (other, json.dumps(perfetto_of(run)))):
            with whole_file(path) as file:
                file.write(text.encode())
    except (TraceError, OSError) as error:
        print(f"joinables trace: {error}", file=sys.stderr)
        return 1
    for remark in run.remarks:
        print(remark)
    print(f"{page}\n{other}")
    return 0
