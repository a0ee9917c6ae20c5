"""Generator of the page of interruptions: ``python -m docs.interrupted`` writes ``docs/interrupted.md``.

The counts are those of the last ``make test-night``, which ``tests/join/failure/test_injected.py`` leaves in a file.
"""

from __future__ import annotations

import json
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE, DATA = FOLDER / "interrupted.md", FOLDER / "outputs" / "interrupted.json"
_PAGE = """\
# Interrupted everywhere

This page counts how often a rank was interrupted while it entered or left a `Join` block. It is generated from results
of `tests/join/failure/test_injected.py`. [When a rank fails](failures.md) explains what the ranks see.

Two ranks train on uneven batches. In each run, rank 1 gets a `KeyboardInterrupt` (Ctrl-C) or SIGKILL in one line of
`join` or `joinables`, the first time that it reaches this line.
{share}

- *Told*: rank 0 ended with a `PeerError` that names rank 1. After a Ctrl-C, the process of rank 1 was still running, so
  rank 0 was told before that process ended.
- *Not needed*: rank 1 had given everything, and rank 0 ended without an error.
- *Not reached*: both ranks ended without an error, since rank 1 had nothing to wait for in that run.

| door | rank 1 is | messages through | runs | told | not needed | not reached |
| --- | --- | --- | --- | --- | --- | --- |
{rows}

Rank 0 never waited without limit, and never ended with another error.

Three lines are missing: the first ones of `Join(...)`, of the beginning and of the end of the `with` statement. An
exception there comes before any code of the library can catch it. The other ranks then get `PeerError` when the process
of rank 1 ends.
"""


def page() -> str:
    """Return the text of the page."""
    data, rows = json.loads(DATA.read_text()), list[str]()
    for case, counts in data["rows"].items():
        cells = [*case.split(", "), sum(counts.values()), *counts.values()]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    runs, of = sum(sum(counts.values()) for counts in data["rows"].values()), data["of"]
    share = "Each line of entering and of leaving has a run of its own."
    if runs < of:
        share = f"These are {runs:,} of {of:,} such runs, drawn at random. `make test-night` makes all of them."
    return _PAGE.format(rows="\n".join(rows), share=share)


if __name__ == "__main__":
    PAGE.write_text(page())
