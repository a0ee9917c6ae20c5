"""Write the page of engines from the table of their tests: ``python -m docs.engines`` writes ``docs/engines.md``.

Each cell of its table is a test: ``tests/engines/table.py`` says how it ends.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.table import COLUMNS, ROWS, Row

PAGE = Path(__file__).parent / "engines.md"
ROOT = PAGE.parent.parent
TOP = """# Engines

<!-- Written by `python -m docs.engines`, from the table of tests/engines. -->

Which engines train exactly on uneven data, and in which loops. Each cell is a test in real processes, and one process,
or one group of processes, has no data. All end where a single process ends on the same global batches. Each link leads
to the code for the engine.

"""
BOTTOM = """
- *yes*: parameters are equal to float rounding: within 1e-12 in float64. DeepSpeed keeps its parameters in float32, and
  they are equal within 2e-6.
- A code, such as J421: all ranks raise [that error](errors.md). J013 is the error of a block that lists the engine's
  objects. J060 is the error of a block with `timeout=`; without a time limit, ranks wait for each other.
- *no*: the loop ends elsewhere, and no error says so. Weights of single ranks have no meaning in a loss over all ranks.

Engines that are neither DDP nor FSDP are not listed: `Join([], process_group=None)`. They differ in how they
average gradients and count micro-batches:

| the engine | code |
| --- | --- |
| averages gradients over ranks | `join.scale(loss)` |
| sums gradients over ranks | `join.scale(loss, divided_over=1)` |
| divides each loss by the micro-batches of a window | `Join(..., loss_divided_by=k)` |
| counts micro-batches and steps by itself | `join.iterate(loader, window=k, fill_window=True)` |
| cannot take empty batches | `join.iterate(loader, dummy="last")` |

Without `weigh=`, pass `divide_by_initial_world_size=False` to `Join`. Otherwise the mean is over all ranks, and a rank
without data counts as gradients of 0.
"""


def link(row: Row) -> str:
    """Return the page that shows an engine: one of the guide, a tutorial or a recipe."""
    if (PAGE.parent / f"{row.page}.md").exists():
        return f"{row.page}.md"
    (script,) = [path for folder in ("tutorials", "recipes") for path in (ROOT / folder).glob(f"{row.page}.py")]
    return f"../{script.relative_to(ROOT).as_posix()}"


def line(row: Row) -> str:
    """Return the row of the table for one engine."""
    cells = [getattr(row, column) for column in COLUMNS]
    told = [f"[{cell}](errors.md#{cell.lower()})" if cell.startswith("J") else cell for cell in cells]
    return f"| [{row.title}]({link(row)}) | {' | '.join(told)} |"


def page() -> str:
    """Return the page."""
    head = ["| engine | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    columns = [f"- *{name}*: {text}." for name, text in COLUMNS.items()]
    return TOP + "\n".join([*head, *map(line, ROWS.values()), "", *columns]) + "\n" + BOTTOM.lstrip("\n")


if __name__ == "__main__":
    PAGE.write_text(page())
