"""Samplers that repeat no sample: :func:`trim` for those that Lightning injects, a warning about a user's own.

Torch's ``DistributedSampler`` repeats samples until all ranks have as many. Here that is not needed, and a sample that
counts twice is not what one process would train on.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from joinables.integrations.lightning.names import rank_zero_warn


class InjectedRank(int):
    """The rank as Lightning gives it to the samplers that it injects, by which they are told from a user's own."""


def trim(loader: Any) -> None:
    """Keep the sampler of ``loader`` from repeating samples, if Lightning has injected it; else warn if it repeats any.

    Args:
        loader: as Lightning has prepared it.
    """
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler) or sampler.drop_last:
        return
    samples = len(sampler.dataset)  # pyright: ignore[reportArgumentType, reportUnknownMemberType]
    if isinstance(sampler.rank, InjectedRank):
        sampler.total_size = samples
        sampler.num_samples = len(range(sampler.rank, samples, sampler.num_replicas))
    elif sampler.total_size > samples:
        rank_zero_warn(
            f"this DistributedSampler repeats {sampler.total_size - samples} of {samples} samples to give all ranks as"
            " many, and they count twice: leave the sampler out, then Trainer(strategy=JoinStrategy()) deals the"
            " samples and repeats none"
        )
