"""Write the page of engines from the table of their tests: ``python -m docs.engines`` writes ``docs/engines.md``.

Each cell of the table is a test, and ``tests/engines/table.py`` has its outcome.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.table import COLUMNS, ROWS, Row

PAGE = Path(__file__).parent / "engines.md"
ROOT = PAGE.parent.parent
TOP = """# Engines: FSDP, DeepSpeed, pipelines and others

<!-- Written by `python -m docs.engines`, from the table of tests/engines. -->

Use this page if something other than plain DDP reduces your gradients, or if the forward or the optimizer communicates.
If the engine is DDP or FSDP, list the module. For any other engine, list nothing and pass its process group (`None` is
the default group). Then loop over `join.iterate`:

```python
with Join([], process_group=None) as join:
    for x in join.iterate(loader, weigh=len):
        engine.backward(join.scale(loss_fn(engine(x))))
        engine.step()
```

**What goes wrong without it.** A rank that is out of data does not take part in the engine's collectives, and the other
ranks wait for it.

Each cell of the table is a test in real processes. In each test, one rank or one group of ranks has no data. The ranks
of a group share their batches: the stages of a pipeline, or the ranks of a tensor-parallel layer. Each link in the
first column leads to code or a page for the engine.

"""
BOTTOM = """
- *yes*: a single process that trains on the same global batches ends with equal parameters, up to float rounding,
  within 1e-12 in float64. DeepSpeed keeps its parameters in float32, and they are equal within 2e-6.
- A code, such as J421: all ranks raise [that error](errors.md). J013 is the error of a block that lists the engine's
  objects. If the cell is J060, the ranks wait for each other. They raise J060 only if you pass `timeout=` to `Join`.
- *no*: the result differs, and no error says so. The loss of the contrastive rows is over the samples of all ranks at
  once, so it cannot be weighed by the batch of one rank.

## Options

Engines differ in how they average gradients and count micro-batches:

| the engine | code |
| --- | --- |
| averages gradients over ranks | `join.scale(loss)` |
| sums gradients over ranks | `join.scale(loss, divided_over=1)` |
| divides each loss by the `k` micro-batches of a window | `Join(..., loss_divided_by=k)` |
| counts micro-batches itself, and steps after `k` of them | `join.iterate(loader, window=k, fill_window=True)` |
| cannot take empty dummies | `join.iterate(loader, dummy="last")` |

Without `weigh=`, pass `divide_by_initial_world_size=False` to `Join`. Otherwise the mean is over all ranks, and a rank
without data counts as gradients of 0.

[For framework authors](authors.md) explains the options for an engine of your own. FSDP2, SyncBatchNorm and tensor
parallelism have [a page of their own](sharded.md).
"""


def link(row: Row) -> str:
    """Return the path of the page, tutorial or recipe that shows an engine."""
    if (PAGE.parent / f"{row.page}.md").exists():
        return f"{row.page}.md"
    (script,) = [path for folder in ("tutorials", "recipes") for path in (ROOT / folder).glob(f"{row.page}.py")]
    return f"../{script.relative_to(ROOT).as_posix()}"


def line(row: Row) -> str:
    """Return the row of the table for one engine."""
    cells = [getattr(row, column) for column in COLUMNS]
    linked = [f"[{cell}](errors.md#{cell.lower()})" if cell.startswith("J") else cell for cell in cells]
    return f"| [{row.title}]({link(row)}) | {' | '.join(linked)} |"


def page() -> str:
    """Return the page."""
    head = ["| engine | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    columns = [f"- *{name}*: {text}." for name, text in COLUMNS.items()]
    return TOP + "\n".join([*head, *map(line, ROWS.values()), "", *columns]) + "\n" + BOTTOM.lstrip("\n")


if __name__ == "__main__":
    PAGE.write_text(page())
