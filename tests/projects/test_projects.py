"""Projects as users write them run to their end, also over kills, and show what a person would expect."""

from __future__ import annotations

import csv
import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from joinables.trainer import ModelCheckpoint
from tests.ending import Ending
from tests.scripts import as_script, run_forked
from tests.training import assert_same, flat_state

CHARACTERS = str(Path(__file__).with_name("characters.py"))
ROOT = Path(__file__).parents[2]


def killed(rank: int, who: int | str, step: int, *arguments: str) -> None:
    """The script, until a process of it is killed at a step: one rank, or their parent."""

    def kill(_: Any, trainer: Any, *arguments: Any) -> None:
        save(_, trainer, *arguments)
        if trainer.global_step == step and trainer.global_rank == (0 if who == "parent" else who):
            os.kill(os.getppid() if who == "parent" else os.getpid(), signal.SIGKILL)

    save = ModelCheckpoint.on_train_batch_end
    with mock.patch.object(ModelCheckpoint, "on_train_batch_end", kill):
        as_script(rank, str(ROOT), CHARACTERS, *arguments)


def ended(folder: Path) -> tuple[dict[str, Any], list[list[float]]]:
    """The state at the end of a fit, and its log."""
    with next(folder.rglob("metrics.csv")).open() as log:
        rows = {row["step"]: list(map(float, row.values())) for row in csv.DictReader(log)}  # some are written again
    last = torch.load(folder / "checkpoints" / "last.ckpt")
    state = {name: last[name] for name in ("epochs", "global_step", "module", "optimizers", "schedulers")}
    return flat_state(state), list(rows.values())


def test_characters_survive_kills(ending: Ending, tmp_path: Path) -> None:
    """Of the epoch that the last ranks go on with, only rank 0 has something left."""
    expected = run_forked(ending, CHARACTERS, str(tmp_path / "whole"), "1")
    folder = str(tmp_path / "killed")
    (end,) = ending.ends(killed, 1, 12, folder, "3", ranks=1, group=False)
    assert (end.code, "Rank 1 was killed by SIGKILL. [J214]" in end.error) == (1, True), end.text
    (end,) = ending.ends(killed, "parent", 17, folder, "2", ranks=1, group=False)
    assert (end.code, end.text) == (-9, "Resuming from step 10 on 2 processes.\n")
    told = run_forked(ending, CHARACTERS, folder, "3")
    assert told == f"Resuming from step 15 on 3 processes.\n{expected}"
    (state, rows), (alone, expected_rows) = ended(Path(folder)), ended(tmp_path / "whole")
    assert_same(state, alone, 1e-4)
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(expected_rows))
