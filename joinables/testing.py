"""Tests of training on uneven inputs: :func:`run_ranks`, :func:`uneven` and :func:`assert_equals_one_process`.

The functions need no test framework, no port and no fixture. :mod:`joinables.processes` starts the ranks on this
machine, and they meet over a file.
"""

from __future__ import annotations

import inspect
import pickle
import tempfile
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import timedelta
from numbers import Number
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist

from join.arguments import checked_timeout
from join.collectives._torch_private import pytree
from join.errors import described
from joinables.processes import OWN, ending_forks, rank_of_group, run

__all__ = ["NotExact", "RankFailed", "assert_equals_one_process", "run_ranks", "uneven"]

T = TypeVar("T")

_NO_LIMIT = 1e6  # seconds
_BEYOND_LIMIT = 60.0  # seconds after the limit when operations of a rank expire; until then it shows its stack


class RankFailed(AssertionError):
    """Exception for a rank that raised an exception, did not return in time, or whose process ended.

    Its message has the traceback of the rank, or the stacks of the ranks that did not return.
    """


class NotExact(AssertionError):
    """Exception for uneven ranks whose result is not the result of a single process."""


# -- ranks ------------------------------------------------------------------------------------------------------------


def run_ranks(
    fn: Callable[..., T],
    world_size: int,
    *args: Any,
    timeout: float | None = 60.0,
    backend: str = "gloo",
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn",
) -> list[T]:
    """Run ``fn(rank, *args)`` as each rank of a process group, and return the results by rank.

    Each rank is a new process of this machine, with the default process group set up. It computes on one thread. When
    this function returns or raises an exception, none of these processes runs any more, nor any process that they have
    started. A process that ``fn`` forks is not a rank. If it leaves ``fn``, it ends.

    Example::

        def total(rank, samples):
            count = torch.tensor(samples[rank])
            dist.all_reduce(count)
            return count.item()

        assert run_ranks(total, 3, [5, 0, 2]) == [7, 7, 7]

    Args:
        fn: The function. Unless processes are forked, it is defined at the top level of a file, and a script calls
            ``run_ranks`` under ``if __name__ == "__main__"``.
        world_size: The number of ranks.
        *args: Further arguments of ``fn``, the same on all ranks.
        timeout: Seconds for the whole call; ``None`` is without limit.
        backend: The backend of the process group. For a GPU, let ``fn`` call ``torch.cuda.set_device`` first.
        start_method: How processes are started. ``"fork"`` pickles nothing, and is the method for notebooks. It is
            fast, because ranks do not import torch again. Fork only if this process has not used a GPU, and has not
            made a process group.

    Returns:
        The results by rank. They are pickled, so return tensors on the CPU.

    Raises:
        RankFailed: If a rank raised an exception, its process ended, or it did not return within ``timeout``. It names
            the rank that has caused the failure.
        TypeError: If ``fn`` or an argument cannot be pickled.
        ValueError: If ``timeout`` is not positive.
    """
    limit = checked_timeout(timeout) or _NO_LIMIT
    call = (fn, args) if start_method == "fork" else _pickled(fn, args)
    with tempfile.TemporaryDirectory(prefix="joinables-", ignore_cleanup_errors=True) as name:
        how: dict[str, Any] = {"method": start_method, "folder": Path(name), "limit": limit}
        results, failures = run(_work, range(world_size), call, world_size, name, backend, limit, **how)
    if not failures:
        return [pickle.loads(result) for result in results]
    shown = [failure for failure in failures if failure.blame == OWN] or failures
    told = [each.text.partition("\n")[0] for each in shown]
    traces = "".join(
        f"\n\n-- rank {each.rank}: {text}\n{each.trace}".rstrip() for text, each in zip(told, shown, strict=True)
    )
    #: SIGKILL is sent when memory has run out. SIGABRT and SIGSEGV come from native code. If a rank exited while it
    #: imported the main script, put the call of run_ranks under if __name__ == "__main__". In a notebook, pass
    #: start_method='fork'.
    ranks = [each.rank for each in shown]
    raise RankFailed(f"Ranks {ranks} failed: {told[0]}. Read their tracebacks or stacks below. [J671]{traces}")


def _pickled(*call: Any) -> bytes:
    try:
        return pickle.dumps(call)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"run_ranks cannot send the function or an argument to a new process: {described(error)}. Define the"
            " function at the top level of a file, or pass start_method='fork'. [J670]"
        ) from error


def _work(rank: int, call: Any, world_size: int, folder: str, backend: str, limit: float) -> bytes:
    """Run the function as one rank, and return its pickled result."""
    torch.set_num_threads(1)
    fn, args = pickle.loads(call) if isinstance(call, bytes) else call
    store, seconds = dist.FileStore(f"{folder}/store", world_size), limit + _BEYOND_LIMIT
    timeout = timedelta(seconds=seconds)
    with rank_of_group(rank, world_size, store, backend, seconds, timeout=timeout), ending_forks():
        return pickle.dumps(fn(rank, *args))


# -- exactness --------------------------------------------------------------------------------------------------------


def uneven(batches: Sequence[T], counts: Sequence[int]) -> list[list[T]]:
    """Distribute a list of batches over ranks, in the order in which ranks train on them.

    Each rank that has batches gets one for the first step, then each rank that has more gets one for the second step.
    So a step of all ranks trains on consecutive batches of the list, and all batches are used once.

    Example::

        assert uneven([1, 2, 3, 4, 5], (1, 0, 4)) == [[1], [], [2, 3, 4, 5]]

    Args:
        batches: The batches.
        counts: The number of batches of each rank.

    Returns:
        The batches by rank.

    Raises:
        ValueError: If the counts do not add up to the number of batches, or if one is negative.
    """
    if min(counts, default=0) < 0 or sum(counts) != len(batches):
        raise ValueError(
            f"counts={tuple(counts)} do not distribute {len(batches)} batches. Pass the number of batches of each rank,"
            " whose sum is the number of all batches. [J672]"
        )
    shares: list[list[T]] = [[] for _ in counts]
    order = sorted((step, rank) for rank, count in enumerate(counts) for step in range(count))
    for (_, rank), batch in zip(order, batches, strict=True):
        shares[rank].append(batch)
    return shares


def concatenated(batches: Sequence[Any]) -> Any:
    """Return one batch of the samples of several, whose tensors are concatenated along their first dimension.

    Raises:
        ValueError: If other objects in the batches differ, or the batches have different structures.
    """

    def merged(*parts: Any) -> Any:
        if all(isinstance(part, torch.Tensor) and part.dim() for part in parts):
            return torch.cat(parts)
        if parts.count(parts[0]) == len(parts):
            return parts[0]
        raise ValueError(
            f"The batches of one step hold {', '.join(map(repr, parts))}, which cannot be concatenated. Pass"
            " concatenate=, a function that makes one batch of a list of batches. [J673]"
        )

    return pytree.tree_map(merged, *batches)


def assert_equals_one_process(
    train: Callable[[list[Any], int, int], Any],
    batches: Sequence[Any],
    counts: Sequence[Sequence[int]],
    *,
    tolerance: float = 1e-5,
    concatenate: Callable[[Sequence[Any]], Any] = concatenated,
    **options: Any,
) -> None:
    """Check that uneven ranks end with the result of a single process that trains on the same batches.

    For each tuple of ``counts``, ``train`` runs on uneven ranks, and once more as the only rank of a process group. A
    batch of the single process consists of the batches that all ranks have in the same step. All processes begin with
    ``torch.manual_seed(0)``.

    Example::

        def train(loader, rank, world_size):
            model = DistributedDataParallel(make_model())
            optimizer = torch.optim.Adam(model.parameters())
            with Join([model, optimizer], divide_by_initial_world_size=False):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss_fn(model(x), y).backward()
                    optimizer.step()
                    yield model.module.state_dict()  # optional: the error then names the first step that differs
            return {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}

        def test_train():
            assert_equals_one_process(train, batches, counts=[(3, 0, 5), (8, 0, 0)])

    Args:
        train: Your training, called as ``train(loader, rank, world_size)``. ``loader`` is the list of this rank's
            batches. Return the results to compare, such as ``state_dict``: tensors, numbers, texts and numpy arrays
            in nested dicts, lists, tuples and dataclasses. A generator may also yield such results after each step.
            Sharded tensors are gathered, so all ranks return or yield them alike.
        batches: The batches of all ranks, distributed by :func:`uneven`.
        counts: The number of batches of each rank, for each run. Let a rank of a run have 0 batches.
        tolerance: The largest difference of two numbers, absolute and relative.
        concatenate: The function that makes one batch of a list of batches. By default, tensors in lists, tuples and
            dicts are concatenated along their first dimension.
        **options: ``timeout``, ``backend`` and ``start_method`` of :func:`run_ranks`, for each run.

    Raises:
        NotExact: If a result differs. It names the first step that differs, and in it the rank and the tensor.
        RankFailed: If ``train`` raised an exception, or its result contains an object that cannot be compared.
        ValueError: If ``counts`` is empty or does not fit ``batches``, or if ``train`` returned no tensor or number.
    """
    if not counts or not all(isinstance(each, Sequence) for each in counts):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"counts={counts!r} holds no runs. Pass a list with a tuple for each run, such as counts=[(3, 0, 5)]: the"
            " number of batches of each rank. [J737]"
        )
    for shares in [uneven(batches, each) for each in counts]:
        _check(train, shares, tolerance, concatenate, options)


def _check(train: Any, shares: Sequence[list[Any]], tolerance: float, concatenate: Any, options: Any) -> None:
    counts = [len(share) for share in shares]
    steps = [[share[step] for share in shares if step < len(share)] for step in range(max(counts))]
    [alone] = run_ranks(_record, 1, train, [[concatenate(parts) for parts in steps]], **options)
    if all(leaf is None for leaf in pytree.tree_leaves(alone[-1])):
        raise ValueError(
            "train returned no tensor or number to compare. Return the state_dict of the module and of the optimizer,"
            " even if train yields results after each step. [J674]"
        )
    ranks: list[list[Any]] = []
    for record in run_ranks(_record, len(shares), train, shares, **options):  # steps on the rank's own batches only
        ranks.append([*record[:-1], *[...] * len(alone)][: len(alone) - 1] + record[-1:])
    for step, (expected, *found) in enumerate(zip(alone, *ranks, strict=False), 1):
        for rank, own in enumerate(found):
            close: Any = {"rtol": tolerance, "atol": tolerance, "equal_nan": True, "check_dtype": False}
            try:
                torch.testing.assert_close(expected if own is ... else own, expected, **close)
            except (AssertionError, TypeError) as error:  # TypeError for objects of different types
                place = "at the end" if step == len(alone) else f"after step {step}"
                raise NotExact(
                    f"Ranks with {counts} batches differ from a single process: rank {rank} {place}. List each object"
                    f" with state, and pass losses to join.scale if batches have different sizes. [J675]\n\n{error}"
                ) from None


def _record(rank: int, train: Callable[..., Any], shares: Sequence[list[Any]]) -> list[Any]:
    """Return copies of the results after each step, if ``train`` yields them, and at the end."""
    torch.manual_seed(0)
    result, steps = train(shares[rank], rank, len(shares)), list[Any]()
    if inspect.isgenerator(result):
        try:
            while True:
                steps.append(_copied(next(result)))
        except StopIteration as end:
            result = end.value
    return [*steps, _copied(result)]


def _copied(value: Any, place: str = "result") -> Any:
    """Return a copy that ``assert_close`` can compare: tensors and numbers in dicts. A text becomes a key of a dict."""
    if isinstance(value, torch.Tensor):
        whole = cast("Any", value).full_tensor() if hasattr(value, "full_tensor") else value
        return whole.detach().to("cpu", copy=True)
    if value is None or isinstance(value, Number):
        return value
    if isinstance(value, (str, bytes, Set)):
        return dict.fromkeys(cast("Set[Any]", value) if isinstance(value, Set) else [value])
    if hasattr(value, "__array_interface__"):  # an array or a number of numpy
        with suppress(TypeError, ValueError):
            return torch.tensor(value.copy(), device="cpu")
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, Sequence):
        value = dict(enumerate(cast("Sequence[Any]", value)))
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {key: _copied(each, f"{place}[{key!r}]") for key, each in items}
    raise TypeError(
        f"train cannot be checked, because {place} is of type {type(value).__name__}, which cannot be compared. Return"
        " or yield tensors, numbers, texts and numpy arrays, in dicts, lists, tuples and dataclasses. [J736]"
    )
