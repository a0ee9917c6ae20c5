"""The result of the demo as text for the terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from demo.compare import Outcome
from demo.data import BATCH_SIZE, BATCHES
from demo.experiment import Experiment, OptimizerName, drifted

WHY: dict[OptimizerName, str] = {
    "Adam": "torch's Join copies no Adam state to early ranks: the replicas diverge in the next epoch.",
    "ZeRO(Adam)": "torch's Join steps the shards of early ranks on old gradients, and never that of rank 2.",
}
"""The error of torch's Join, by optimizer."""


def as_text(experiment: Experiment) -> str:
    """Return the steps of each rank, and the difference of each run to a single process."""
    return "\n".join(_lines(experiment))


def _lines(experiment: Experiment) -> Iterator[str]:
    batches = ", ".join(map(str, BATCHES))
    yield f"Digits on {len(BATCHES)} ranks, which have {batches} batches of {BATCH_SIZE} in each epoch."
    for optimizer, runs in experiment.outcomes.items():
        yield f"\nDDP + {optimizer}"
        if runs["joinables"].reports:
            yield "\n  The last epoch, by trainer.join_report:\n"
            yield "    rank   batches   shadowed   joined at      idle"
            for row in runs["joinables"].reports[-1]["ranks"]:
                counts = f"{row['rank']:8}{row['steps']:10}{row['shadowed']:11}"
                yield f"{counts}{row['joined_at']:10.2f} s{row['idle']:8.2f} s"
        yield f"\n  After epoch {experiment.epochs}:\n"
        yield "                          largest difference of a       accuracy on"
        yield "                    parameter to a single process    validation set"
        yield f"    a single process{experiment.accuracy:47.1%}"
        yield f"    this library's Join{_columns(runs['joinables'])}"
        yield f"    torch's Join       {_columns(runs['torch'])}"
        if runs["torch"].status == "finished" and drifted(runs["torch"]):
            yield f"\n  {WHY[optimizer]}"


def _columns(outcome: Outcome) -> str:
    if outcome.parameter_difference is None or outcome.accuracy is None:
        return f"{outcome.status:>26}"
    return f"{outcome.parameter_difference:26.1e}{outcome.accuracy:18.1%}"


def as_json(experiment: Experiment) -> str:
    """Return all results and curves as JSON."""
    result = {
        "epochs": experiment.epochs,
        "batch_size": BATCH_SIZE,
        "batches_per_rank": BATCHES,
        "one_process": {"accuracy": experiment.accuracy, "losses": experiment.losses},
        "runs": {
            optimizer: {join: asdict(outcome) for join, outcome in runs.items()}
            for optimizer, runs in experiment.outcomes.items()
        },
    }
    return json.dumps(result, indent=2) + "\n"
