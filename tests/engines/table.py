"""Table of engines: the tests in this folder run every cell, and ``docs/engines.py`` writes a page from it.

A cell says how a loop ends if one rank has no data: "yes" if the parameters are those of a single process; the code of
an error, such as "J421", if all ranks raise that error; "no" if the parameters differ, which the library cannot notice.
"""

from __future__ import annotations

from dataclasses import dataclass

COLUMNS = {
    "plain": "a plain block, around the unchanged loop",
    "iterate": "a loop over `join.iterate`",
    "weights": "with `weigh=`: each batch counts by its number of samples",
    "accumulation": "with `window=2`, and an incomplete last window. Rows with *yes* under *weights* run with `weigh=`"
    " here, too",
    "resume": "the run of *accumulation*, stopped after two steps, and resumed from a checkpoint with new objects",
}
"""Columns of the table, and what each of them tests."""

LATE = "J060"
"""Error of a plain block with ``timeout=`` whose ranks wait in a collective that other ranks do not reach."""


@dataclass(frozen=True)
class Row:
    """An engine, and how each cell of it ends."""

    title: str
    page: str
    """Name of the recipe, tutorial or guide page that shows the engine."""
    plain: str
    iterate: str = "yes"
    weights: str = "yes"
    accumulation: str = "yes"
    resume: str = "yes"
    counts: tuple[int, ...] = (3, 5, 0)
    """Numbers of batches of the ranks, or of groups of ranks that share their batches."""
    ranks: int = 3
    package: str = ""
    """Package that has to be installed besides torch."""


@dataclass(frozen=True)
class Cell:
    """One way to train with one engine."""

    engine: str
    column: str
    outcome: str

    def __str__(self) -> str:
        return f"{self.engine}-{self.column}"

    @property
    def row(self) -> Row:
        return ROWS[self.engine]

    @property
    def is_plain(self) -> bool:
        return self.column == "plain"

    @property
    def timeout(self) -> float | None:
        """Time limit of the block, if its ranks wait in collectives that it does not see."""
        return 2 if self.outcome == LATE else None

    @property
    def weighs(self) -> bool:
        return self.column in ("weights", "accumulation", "resume")

    @property
    def window(self) -> int:
        return 2 if self.column in ("accumulation", "resume") else 1


ROWS: dict[str, Row] = {
    "DDP": Row("DDP", "01_uneven_ddp", plain="yes"),
    "SyncBatchNorm": Row("DDP with SyncBatchNorm", "sharded", plain="J421"),
    "FSDP1": Row("FSDP1 (`FullyShardedDataParallel`)", "fsdp1", plain="J421"),
    "FSDP2": Row("FSDP2 (`fully_shard`)", "09_fsdp2", plain="J421"),
    "HSDP": Row("HSDP: two replicas of two shards", "device_meshes", plain="J421", counts=(3, 5, 0, 1), ranks=4),
    "tensor parallelism": Row(
        "tensor parallelism under `fully_shard`", "device_meshes", plain="J421", counts=(5, 0), ranks=4
    ),
    "tensor parallelism in DDP": Row(
        "tensor parallelism under DDP", "device_meshes", plain="yes", counts=(5, 0), ranks=4
    ),
    **{
        f"ZeRO {stage}": Row(f"DeepSpeed, ZeRO {stage}", "deepspeed_zero", plain="J013", package="deepspeed")
        for stage in range(4)
    },
    "averaging by hand": Row("gradients averaged by hand, as Megatron does", "averaging_by_hand", plain="J013"),
    "summing by hand": Row("gradients summed by hand (`divided_over=1`)", "averaging_by_hand", plain="J013"),
    "counting engine": Row(
        "an engine that counts micro-batches itself (`fill_window=True`)", "counting_engine", plain="J013"
    ),
    "expert parallelism": Row("expert parallelism: all-to-all in the forward", "expert_parallel", plain="J013"),
    "expert parallelism in DDP": Row(
        "expert parallelism, with DDP around all but the experts", "expert_parallel", plain=LATE
    ),
    "sharded optimizer": Row(
        "an optimizer that shards itself, as implementations of Muon do", "sharded_optimizer", plain=LATE
    ),
    "contrastive": Row(
        "contrastive loss over features of all ranks, gradients only through the rank's own features",
        "contrastive",
        plain=LATE,
        weights="no",
    ),
    "contrastive, all gradients": Row(
        "contrastive loss over features of all ranks, gradients through the features of all ranks",
        "contrastive",
        plain=LATE,
        weights="no",
    ),
    "pipelining": Row(
        "`torch.distributed.pipelining`, two stages, two replicas",
        "pipeline_parallel",
        plain="J013",
        counts=(5, 0),
        ranks=4,
    ),
}


def cells_of(*engines: str) -> list[Cell]:
    """Return the cells of these engines."""
    return [Cell(engine, column, getattr(ROWS[engine], column)) for engine in engines for column in COLUMNS]
