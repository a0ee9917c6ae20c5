"""Tutorial 3: a custom joinable, tested on threads and on processes.

If an object communicates in the training loop, ranks that are out of data have to *shadow* its collectives: they issue
the same collectives, and contribute nothing. The `main_hook` of a *joinable* does this. Here the joinable is a counter:
each rank passes the size of its batch, an all-reduce adds the sizes, and every rank has the total. The ranks are first
threads, which need no process group and name a mistake, and then processes, as in a training.
"""

import torch

from join.collectives import Collective, ReduceOp, collective_of, run_threads
from joinables import Join, Joinable, JoinHook
from joinables.testing import run_ranks


class SampleCounter(Joinable, JoinHook):
    """Counter of the samples that all ranks have seen."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self.collective = collective
        self.total = 0

    def count(self, samples: int) -> None:
        Join.notify_join_context(self)  # before the collectives, so that ranks without data shadow them
        self.total += self.all_reduce(samples)

    def all_reduce(self, value: int, op: ReduceOp = "sum") -> int:
        tensor = torch.tensor(value)
        self.collective.all_reduce(tensor, op).wait()
        return int(tensor)

    def join_hook(self, **kwargs: object) -> JoinHook:
        return self

    join_device = torch.device("cpu")

    @property
    def join_process_group(self) -> Collective:
        return self.collective

    def main_hook(self) -> None:
        """Shadow one `count` of other ranks, with the same all-reduce. `Join` calls this on ranks without data."""
        self.all_reduce(0)

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the total from the ranks that ran out of data last. The other ranks have missed samples."""
        self.total = self.all_reduce(self.total if is_last_joiner else 0, "max")


class ForgetfulCounter(SampleCounter):
    def main_hook(self) -> None:
        pass  # a mistake, because `count` communicates


def count_on_rank(counter: SampleCounter) -> tuple[int, int]:
    with Join([counter]):
        for _ in range(counter.collective.rank):  # rank r has r batches
            counter.count(10)
        total_when_out = counter.total
    return total_when_out, counter.total


if __name__ == "__main__":
    print("Four ranks, each a thread, with 0, 1, 2 and 3 batches of 10 samples:\n")
    results = run_threads(4, lambda collective: count_on_rank(SampleCounter(collective)))
    for rank, (total_when_out, total) in enumerate(results):
        print(f"  rank {rank} knew of {total_when_out:2} samples when it ran out, and of {total} after the block")
    assert results == [(0, 60), (30, 60), (50, 60), (60, 60)]

    print("\nThe same with a main_hook that forgets its all-reduce. Processes would hang; threads say what is wrong:\n")
    try:
        run_threads(4, lambda collective: count_on_rank(ForgetfulCounter(collective)), timeout=5.0)
    except RuntimeError as error:
        print(f"  {str(error)[str(error).index('Waiting') :].partition('. ')[0]}.")

    assert results == run_ranks(lambda _: count_on_rank(SampleCounter(collective_of(None))), 4, start_method="fork")
    print("\nThe right counter has the same totals on four processes.")
