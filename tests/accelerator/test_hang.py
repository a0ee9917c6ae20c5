"""Each row of the table in ``docs/hang.md`` on an accelerator: a rank waits where it reads a result from its device."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests import hangs
from tests.accelerator import simulated
from tests.accelerator.target import Target, device_of_rank, prepare_simulated
from tests.ending import Ending
from tests.explained import ends_once_explained
from tests.training import build

END = r"waits for the others at the end of the block \(hangs\.py:\d+, in \w+\)"
LATER = r"in (the block|torch\.\S+) \(hangs\.py:\d+, in (train|log_loss|barrier|gather)\)"
HANGS: dict[Callable[..., None], str] = {
    hangs.last_steps: f"rank 0: out of data, {END}\n  ranks? 1(-2)?: {LATER}",
    hangs.metric: f"rank 0: out of data since step 1, {END}\n  ranks? 1(-2)?: {LATER}",
    hangs.barrier: f"rank 0: out of data since step 1, {END}\n  ranks? 1(-2)?: {LATER}",
    hangs.gather: f"rank 0: out of data since step 1, {END}\n  ranks? 1(-2)?: {LATER}",
    hangs.evaluation: f"rank 0: {LATER}\n  ranks? 1(-2)?: out of data since step 2, {END}",
}


def hang(rank: int, target: Target, loop: Callable[..., None]) -> None:
    with ends_once_explained(2.5):
        model = DistributedDataParallel(build("mlp").to(device_of_rank(target)))
        hangs.train(model, rank, 0)
        if target.is_simulated:
            simulated.configure(stall=1.0, watchdog=60.0)  # only now: until then, ranks may come late
        loop(rank, model)


@pytest.mark.parametrize(("loop", "over_group"), [*((loop, False) for loop in HANGS), (hangs.metric, True)])
def test_a_wait_explains_itself(ending: Ending, target: Target, loop: Callable[..., None], over_group: bool) -> None:
    how: Any = {"backend": target.backend, "prepare": prepare_simulated if target.is_simulated else None}
    ends = ending.ends(hang, target, loop, ranks=target.ranks(3), over_group=over_group, tidies=False, limit=50, **how)
    text = "".join(end.stderr for end in ends)
    assert [end.code for end in ends] == [0] * len(ends) and text.count("join: no rank has moved") == 1, text
    assert re.search(rf"\n  {HANGS[loop]}\n(Rank|Either it takes so long there, or rank)s? .* never call", text), text
