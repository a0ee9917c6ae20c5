"""What ranks read and gather with Accelerate, and what is refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from join import JoinError
from tests.ending import Ending
from tests.harness import Pool
from tests.integrations.ranks import accelerator, imported, launched
from tests.training import assert_same, batch, build

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")

RANKS = 2


def gather(rank: int, counts: tuple[int, ...]) -> tuple[Any, ...]:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        model = accelerate.prepare(build("mlp"))
        found: list[Any] = []
        names: list[str] = []
        data = [batch(rank, 0, step)[0][: 1 + rank + step] for step in range(counts[rank])]
        with join_uneven_inputs(accelerate, [model]) as join, torch.no_grad():
            for x in join.iterate(data):
                gathered = accelerate.gather_for_metrics({"x": x, "y": (model(x), x.sum())})
                found.append([gathered["x"], gathered["y"][0], gathered["y"][1]])
                names += accelerate.gather_for_metrics([f"{rank}: {len(x)}"], use_gather_object=True)
            with pytest.raises(JoinError, match=r"call accelerator\.gather_for_metrics only in the body"):
                accelerate.gather_for_metrics(torch.ones(1))
        return found, names, accelerate.gather_for_metrics(torch.ones(1)).shape


@pytest.mark.parametrize("counts", [(3, 1), (0, 2)])
def test_gathering_in_step(pool: Pool, counts: tuple[int, ...]) -> None:
    data = [[batch(rank, 0, step)[0][: 1 + rank + step] for step in range(counts[rank])] for rank in range(RANKS)]
    model = build("mlp")
    for found, names, after in pool.run(gather, counts, ranks=RANKS):
        assert after == (RANKS,)
        for step, (x, y, sums) in enumerate(found):
            there = [own[step] for own in data if step < len(own)]
            torch.testing.assert_close(x, torch.cat(there))
            torch.testing.assert_close(y, model(torch.cat(there)))
            torch.testing.assert_close(sums, torch.stack([each.sum() for each in there]))
        steps = range(max(counts))
        assert names == [f"{rank}: {1 + rank + step}" for step in steps for rank in range(RANKS) if step < counts[rank]]


def gather_one_row(rank: int, samples: int) -> list[int]:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        model = accelerate.prepare(build("mlp"))
        data = [batch(rank, 0, step)[0][:samples] for step in range(rank)]
        with join_uneven_inputs(accelerate, [model]) as join, torch.no_grad():
            for x in join.iterate(data):
                own = x[:1] if samples == 1 or rank else x.flatten()[: 1 + len(x)]  # as of words, with any number
                return [len(accelerate.gather_for_metrics(each)) for each in (x, own, x.mean())]
    return []


def test_one_row_is_not_always_a_sum(pool: Pool) -> None:
    assert pool.run(gather_one_row, 1, ranks=RANKS) == [[1, 1, 1]] * RANKS
    assert pool.run(gather_one_row, 3, ranks=RANKS) == [[3, 1, 1]] * RANKS


def train_locally(rank: int, in_loop: bool) -> None:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        model = accelerate.prepare(build("mlp"))
        local = imported("accelerate.local_sgd").LocalSGD
        data = [batch(rank, 0, step)[0] for step in range(rank)]
        with join_uneven_inputs(accelerate, [model]) as join:
            told = pytest.raises(
                JoinError, match=r"call accelerator\.reduce only in the body of a loop over .* \[J116\]"
            )
            with told, local(accelerate, model, local_sgd_steps=1) as sgd:
                for x in join.iterate(data) if in_loop else ():
                    accelerate.backward(model(x).square().mean())
                    sgd.step()


@pytest.mark.parametrize("in_loop", [True, False])
def test_local_sgd_is_refused(ending: Ending, in_loop: bool) -> None:
    ending.run(train_locally, in_loop, ranks=RANKS)


def evaluate(rank: int, counts: tuple[int, ...], even: bool, stops: bool) -> tuple[list[list[int]], list[float]]:
    """Evaluate in each training step, on a prepared loader; what is counted, and the mean of the training losses."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accelerate = accelerator()
        model = accelerate.prepare(build("mlp"))
        held_out = accelerate.prepare(DataLoader(TensorDataset(torch.arange(13)), batch_size=2))
        counted, losses = list[list[int]](), list[float]()
        with join_uneven_inputs(accelerate, [model], even_batches=even) as join:
            for x, _ in join.iterate([batch(rank, 0, step) for step in range(counts[rank])]):
                assert len(accelerate.gather_for_metrics(x)) == len(x) * sum(len(losses) < count for count in counts)
                loss = model(x).square().mean()
                accelerate.backward(loss)
                numbers = list[int]()
                for (part,) in held_out:
                    numbers += accelerate.gather_for_metrics(part).tolist()
                    if stops:
                        break
                with pytest.raises(JoinError, match=r"after an evaluation in the same step.*\[J726\]"):
                    accelerate.gather_for_metrics(part)  # rows of a rank whose training batch is a dummy would be lost
                with pytest.raises(JoinError, match=r"\[J725\]"):
                    accelerate.reduce(torch.tensor(len(numbers)))
                counted.append(sorted(numbers))
                losses.append(float(accelerate.reduce(loss.detach(), "mean")))
        return counted, losses


@pytest.mark.parametrize(("even", "stops"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("counts", [(3, 1), (0, 2)])
def test_an_evaluation_in_the_loop_counts_each_sample_once(
    pool: Pool, counts: tuple[int, ...], even: bool, stops: bool
) -> None:
    """Also on a rank whose training batch is a dummy, which counts in no training loss."""
    model = build("mlp")
    for counted, losses in pool.run(evaluate, counts, even, stops, ranks=RANKS):
        assert counted == [list(range(4 if stops else 13))] * max(counts)
        for step, loss in enumerate(losses):
            data = [batch(rank, 0, step)[0] for rank in range(RANKS) if step < counts[rank]]
            expected = torch.stack([model(x).square().mean() for x in data]).mean()
            assert loss == pytest.approx(expected.item())


def read(rank: int, given: bool, inside: bool | None) -> tuple[list[float], list[str], bool]:
    """What a rank reads of a data set of 5 samples, and what it is told."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator(dataloader_config=imported("accelerate").DataLoaderConfiguration(even_batches=given))
        loader = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2)
        model, loader = accelerate.prepare(build("mlp"), loader)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with join_uneven_inputs(accelerate, [model], even_batches=inside):
                found = [sample.item() for (samples,) in loader for sample in samples]
        return found, [str(each.message) for each in told], loader.batch_sampler.even_batches


@pytest.mark.parametrize(("given", "inside"), [(True, None), (True, False), (True, True), (False, None)])
def test_samples_that_are_repeated(pool: Pool, given: bool, inside: bool | None) -> None:
    results = pool.run(read, given, inside, ranks=RANKS)
    found = sorted(sample for samples, *_ in results for sample in samples)
    repeats = given if inside is None else inside
    assert (found == [0.0, 1.0, 2.0, 3.0, 4.0]) is not repeats
    for _, told, after in results:
        assert after is given
        texts = [text for text in told if "A prepared loader repeats samples" in text]
        assert len(texts) == (given and inside is None)


class Asked:
    """A loader that others read."""

    def __init__(self, *loaders: Any) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.loaders)


def train_on_prepared(rank: int, count: int, kind: str) -> tuple[list[float], list[int]]:
    """Train on prepared loaders; the samples that counted, and the sizes of evaluations."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate, found, sizes = accelerator(), list[float](), list[int]()
        data = TensorDataset(torch.arange(float(count))[:, None])
        model, *loaders = accelerate.prepare(torch.nn.Linear(1, 1), *[DataLoader(data, batch_size=4) for _ in "ab"])
        with join_uneven_inputs(accelerate, [model], even_batches=False) as join:
            if kind == "prepared inside":
                loaders = [accelerate.prepare(DataLoader(data, batch_size=4))]
            loops = [loaders[0], loaders[0]] if kind == "two loops" else [loaders[0]]
            for loader in [Asked(*loaders)] if kind == "chained" else loops:
                batches = join.iterate(loader)
                assert kind != "length" or len(batches) == -(-count // 8)
                for (x,) in batches:
                    accelerate.backward(model(x).mean())
                    found += [] if join.shadowing else x.flatten().tolist()
                    if kind in ("evaluated", "prepared inside"):
                        sizes.append(sum(len(accelerate.gather_for_metrics(part)) for (part,) in loaders[0]))
        return found, sizes


@pytest.mark.parametrize("kind", ["alone", "length", "two loops", "chained", "evaluated", "prepared inside"])
@pytest.mark.parametrize("count", [18, 3])
def test_no_sample_of_a_prepared_loader_is_repeated(pool: Pool, count: int, kind: str) -> None:
    """The loop reads before its first step, or between two, or from a loader that is evaluated in a step, too."""
    ranks = pool.run(train_on_prepared, count, kind, ranks=RANKS)
    times = 2 if kind in ("two loops", "chained") else 1
    assert sorted(each for found, _ in ranks for each in found) == sorted([*range(count)] * times)
    assert all(size == count for _, sizes in ranks for size in sizes)
    assert len(ranks[0][1]) == (-(-count // 8) if kind in ("evaluated", "prepared inside") else 0)


def read_dispatched(rank: int, iterate: bool) -> tuple[list[float], list[str]]:
    """What a rank reads of a data set of 5 samples that rank 0 reads for all."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        dispatching = imported("accelerate").DataLoaderConfiguration(dispatch_batches=True)
        accelerate = accelerator(dataloader_config=dispatching)
        loader = DataLoader(TensorDataset(torch.arange(5.0)), batch_size=2)
        model, loader = accelerate.prepare(torch.nn.Linear(1, 1), loader)
        found: list[float] = []
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            with join_uneven_inputs(accelerate, [model]) as join:
                for (samples,) in join.iterate(loader) if iterate else loader:
                    found += samples.tolist()
                    accelerate.backward(model(samples.unsqueeze(1)).mean())
        return found, [str(each.message) for each in told]


@pytest.mark.parametrize("iterate", [False, True])
def test_batches_that_are_dispatched(pool: Pool, iterate: bool) -> None:
    results = pool.run(read_dispatched, iterate, ranks=RANKS)
    assert [found for found, _ in results] == [[0.0, 1.0, 4.0], [2.0, 3.0, 0.0]]
    for _, told in results:
        assert any("yields the same number of batches on all ranks, and may repeat samples" in text for text in told)


def scale(rank: int, iterate: bool) -> tuple[dict[str, torch.Tensor], float]:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        accelerate.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)  # as it has one on GPUs
        net = build("mlp")
        model, optimizer = accelerate.prepare(net, torch.optim.Adam(net.parameters()))
        data = [batch(rank, 0, step) for step in range((4, 1)[rank])]
        with join_uneven_inputs(accelerate, [model, optimizer]) as join:
            for x, y in join.iterate(data) if iterate else data:
                optimizer.zero_grad()
                accelerate.backward(((model(x) - y) ** 2).mean())
                optimizer.step()
        return net.state_dict(), accelerate.scaler.get_scale()


@pytest.mark.parametrize("iterate", [False, True])
def test_a_gradient_scaler_that_is_not_listed(pool: Pool, iterate: bool) -> None:
    net = build("mlp")
    optimizer = torch.optim.Adam(net.parameters())
    for step in range(4):
        optimizer.zero_grad()
        there = [batch(rank, 0, step) for rank in range(RANKS) if step < (4, 1)[rank]]
        for x, y in there:
            (((net(x) - y) ** 2).mean() / len(there)).backward()
        optimizer.step()
    for state, found in pool.run(scale, iterate, ranks=RANKS):
        assert_same(state, net.state_dict(), 1e-5)
        assert found == 4096  # it has grown twice


def refused(rank: int) -> list[str]:
    from joinables.integrations.accelerate import join_uneven_inputs

    told: list[str] = []

    def refuse(accelerate: Any, objects: Any) -> None:
        try:
            join_uneven_inputs(accelerate, objects)
        except (TypeError, ValueError) as error:
            told.append(f"{type(error).__name__}: {error}")

    with launched():
        model = build("mlp")
        refuse(model, [model])
        refuse(accelerator(), [DistributedDataParallel(DistributedDataParallel(model))])
        refuse(accelerator(), [model])
    with launched():
        plugin = imported("accelerate.utils").GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
        accelerate = accelerator(gradient_accumulation_plugin=plugin)
        refuse(accelerate, [accelerate.prepare(model)])
    with launched():
        refuse(accelerator(fsdp=1), [model])
    return told


def test_what_is_refused(pool: Pool) -> None:
    expected = [
        "TypeError: accelerator is of type MLP. Pass an accelerate.Accelerator",
        "ValueError: The module is wrapped in DistributedDataParallel twice",
        r"ValueError: Join\(\[MLP\]\) lists no object that communicates",
        "ValueError: With sync_each_batch=True, each micro-batch is reduced",
        "ValueError: FSDP1 cannot join",
    ]
    for told in pool.run(refused, ranks=RANKS):
        assert len(told) == len(expected)
        for text, pattern in zip(told, expected, strict=True):
            assert re.match(pattern, text), text


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    from joinables.integrations.accelerate import check_accelerator

    with launched():
        accelerate = accelerator()
        for version in ("1.11.0", "1.16rc0"):
            monkeypatch.setattr(imported("accelerate"), "__version__", version)
            check_accelerator(accelerate)
        monkeypatch.setattr(imported("accelerate"), "__version__", "1.10.1")
        with pytest.raises(ImportError, match=r"does not support accelerate 1\.10\.1\. Install a version"):
            check_accelerator(accelerate)


def test_one_process() -> None:
    """A loop over ``join.iterate`` is exact there too: also a last window that is not full, also with weights."""
    from joinables.integrations.accelerate import join_uneven_inputs

    data = [tuple(part[: 1 + step] for part in batch(0, 0, step)) for step in range(3)]
    net, steps, counted = build("mlp"), [], 0.0
    with launched():
        accelerate = accelerator(gradient_accumulation_steps=2)
        model, optimizer = accelerate.prepare(net, torch.optim.Adam(net.parameters(), lr=0.01))
        with join_uneven_inputs(accelerate, [model, optimizer]) as join:
            for x, y in join.iterate(data, weigh=lambda each: len(each[0])):
                with accelerate.accumulate(model):
                    accelerate.backward(((model(x) - y) ** 2).mean())
                    steps.append(accelerate.sync_gradients)
                    optimizer.step()
                    optimizer.zero_grad()
                counted += join.weight or 0.0
                assert len(accelerate.gather_for_metrics(x)) == len(x)
        assert {"backward", "_do_sync"}.isdisjoint(vars(accelerate))
    assert steps == [False, True, True]
    assert counted == 6
    expected = build("mlp")
    optimizer = torch.optim.Adam(expected.parameters(), lr=0.01)
    for window in (data[:2], data[2:]):
        x, y = (torch.cat(each) for each in zip(*window, strict=True))
        ((expected(x) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(net.state_dict(), expected.state_dict(), 1e-6)
