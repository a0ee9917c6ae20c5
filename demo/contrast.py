"""The contrast: a training loop without a trainer, under torch's own ``Join``."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from demo.data import BATCH_SIZE, BATCHES, STEPS, Shard, load
from demo.record import Record, flat_parameters
from demo.train import Digits
from joinables.trainer import Launcher

PATIENCE = timedelta(seconds=20)
"""A collective that takes longer hangs. A step takes a hundredth of a second."""


def train_by_hand(epochs: int, shardings: Sequence[bool]) -> list[list[Record] | str]:
    """Train once for each entry of ``shardings``: with plain Adam, or with ZeRO if it is true.

    Returns:
        For each training the records of its ranks, or ``"hangs"`` or ``"fails"``. The traceback of a failure is on
        stderr.
    """
    try:
        return Launcher(len(BATCHES), timeout=PATIENCE).launch(_train_all, epochs, shardings, load()[0])
    except Exception as error:
        if len(shardings) > 1:  # try each one again in its own processes
            return [outcome for sharded in shardings for outcome in train_by_hand(epochs, [sharded])]
        traceback.print_exc()
        return ["hangs" if "timed out" in str(error).lower() else "fails"]


def _train_all(epochs: int, shardings: Sequence[bool], dataset: Dataset) -> list[list[Record]]:
    return [_train(epochs, sharded, dataset) for sharded in shardings]


def _train(epochs: int, sharded: bool, dataset: Dataset) -> list[Record]:
    digits = Digits()
    model = DistributedDataParallel(digits.net)
    optimizer = digits.configure_optimizers()
    joinables = [model]  # torch's Join takes no stock optimizer
    if sharded:
        from joinables.zero import ZeroRedundancyOptimizer  # torch's own, without the notices of its import

        optimizer = ZeroRedundancyOptimizer(model.parameters(), type(optimizer), lr=optimizer.defaults["lr"])
        joinables.append(optimizer)
    shard = Shard()
    loader = DataLoader(dataset, BATCH_SIZE, sampler=shard)
    record: Record = {"losses": {}, "snapshots": {}}
    for epoch in range(epochs):
        shard.set_epoch(epoch)
        with Join(joinables, divide_by_initial_world_size=False):
            for step, (images, labels) in enumerate(loader, start=epoch * STEPS):
                optimizer.zero_grad()
                loss = cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                record["losses"][step] = loss.item()
                record["snapshots"][step] = flat_parameters(digits)
    records: list[Record] = [{} for _ in BATCHES]
    dist.all_gather_object(records, {**record, "state": digits.state_dict()})
    return records
