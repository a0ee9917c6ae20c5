"""The pictures of the page about performance show the figures of its tables."""

from __future__ import annotations

import re

import pytest

from docs import two_ranks
from docs.plots import PICTURES, picture, tables


@pytest.mark.parametrize("name", PICTURES)
def test_bars_are_those_of_the_table(name: str) -> None:
    rows = tables()[name]
    drawn = PICTURES[name].read_text()
    assert drawn == picture(rows), "run python -m docs.plots"
    ratios = [cost for _, costs in rows for cost in costs.values()]
    assert len(rows) >= 2 and {way for _, costs in rows for way in costs} >= {
        "torch's Join",
        "Join",
        "iterate",
    }
    assert re.findall(r'class="n">([\d.]+|no)<', drawn) == ["no" if each is None else f"{each:.2f}" for each in ratios]


def test_the_two_timelines_are_those_of_the_script() -> None:
    assert two_ranks.PICTURE.read_text() == two_ranks.picture(), "run python -m docs.two_ranks"
