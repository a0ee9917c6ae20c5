"""The picture of the order of collectives shows what ranks do."""

from __future__ import annotations

import re

from docs.order import PICTURE, step_of, train
from tests.harness import Pool


def test_both_ranks_do_what_the_picture_shows(pool: Pool) -> None:
    rows = step_of(*pool.run(train, ranks=2))
    shown = re.findall(r">([\w -]+)</text>", PICTURE.read_text())
    assert [text for text in shown if text.startswith(("header", "broadcast", "all-reduce"))] == [
        str(entry) for _, *entries in rows for entry in entries
    ]
    assert len(rows) > 8
    for _, active, joined in rows:
        assert active == joined
