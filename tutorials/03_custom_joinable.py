"""Tutorial 3: a joinable of your own, tested without starting a single process.

    python tutorials/03_custom_joinable.py

Whatever communicates in the training loop must be shadowed by the ranks that have run out of inputs. Here it is a
counter: each rank reports the size of its batch, an all-reduce adds them up, and every rank knows the total.
"""

import torch

from join import Join, Joinable, JoinHook
from join.collectives import Collective, run_threads


class SampleCounter(Joinable):
    """Counts the samples that all ranks have seen."""

    def __init__(self, collective: Collective) -> None:
        super().__init__()
        self.collective = collective  # in a program of processes: join.collectives.collective_of(None)
        self.total = 0

    def count(self, samples: int) -> None:
        Join.notify_join_context(self)  # before the collectives: "I still have inputs, shadow what comes now"
        self.total += self.add_up(samples)

    def add_up(self, samples: int) -> int:
        tensor = torch.tensor(samples)
        self.collective.all_reduce(tensor).wait()
        return int(tensor)

    def join_hook(self, **kwargs: object) -> JoinHook:
        return SampleCounterHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Collective:
        return self.collective


class SampleCounterHook(JoinHook):
    """What a joined rank does for a counter."""

    def __init__(self, counter: SampleCounter) -> None:
        self.counter = counter

    def main_hook(self) -> None:
        self.counter.add_up(0)  # the collectives of one count(), in the same order, with nothing to add

    def post_hook(self, is_last_joiner: bool) -> None:
        # Ranks that ran out early have missed what the others counted. The last joiners know it all: take it from them.
        total = torch.tensor(self.counter.total if is_last_joiner else 0)
        self.counter.collective.all_reduce(total, "max").wait()
        self.counter.total = int(total)


class ForgetfulCounter(SampleCounter):
    def join_hook(self, **kwargs: object) -> JoinHook:
        return JoinHook()  # its main_hook does nothing, though count() communicates


def count_on_rank(counter: SampleCounter) -> tuple[int, int]:
    """Rank r has r batches, of 10 samples each."""
    with Join([counter]):
        for _ in range(counter.collective.rank):
            counter.count(10)
        before = counter.total
    return before, counter.total


if __name__ == "__main__":
    print("Four ranks as threads, with 0, 1, 2 and 3 batches of 10 samples:\n")
    results = run_threads(4, lambda collective: count_on_rank(SampleCounter(collective)))
    for rank, (before, after) in enumerate(results):
        print(f"  rank {rank} knew of {before:2} samples when it ran out, and of {after} after the block")
    assert [after for _, after in results] == [60] * 4

    print(
        "\nThe same with a main_hook that forgets the all-reduce. Processes would hang; threads tell what is wrong:\n"
    )
    try:
        run_threads(4, lambda collective: count_on_rank(ForgetfulCounter(collective)))
    except RuntimeError as error:
        print(f"  {error}")
    else:
        raise AssertionError("a joinable that does not shadow its collectives must not pass")
