"""The collective suite on a rank of Horovod: ``horovodrun --gloo -np 2 python -m tests.horovod.run``."""

from __future__ import annotations

import faulthandler
import os
import time

import horovod.torch as hvd  # pyright: ignore[reportMissingImports]
import torch

from join.collectives.horovod import HorovodCollective
from tests.conformance.collective_suite import CHECKS, check_lifecycle, check_refuses_when_not_set_up

HANGS_AFTER_SECONDS = 120


def main() -> None:
    faulthandler.dump_traceback_later(HANGS_AFTER_SECONDS, exit=True)
    torch.set_num_threads(1)
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    collective = HorovodCollective()
    check_refuses_when_not_set_up(collective)
    started = time.monotonic()
    check_lifecycle(collective, rank, size)
    check_refuses_when_not_set_up(collective)
    assert not hvd.is_initialized()
    print(f"rank {rank} of {size}: {len(CHECKS)} checks passed twice in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    main()
