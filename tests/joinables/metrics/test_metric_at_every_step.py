"""``Metric(metric, every_step=True)``: what a call returns is the value of one process for the batches of all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MaxMetric, MeanMetric, Metric, MetricCollection, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric

import joinables
from join import Join, JoinError, PeerError, ProtocolError
from join.collectives import ThreadCollective
from tests.ending import Ending
from tests.join.counter import Counter, Leading
from tests.joinables.metrics.test_metric import on_threads, ranks_without_updates
from tests.models import assert_same, batch, build, flat_state
from tests.pool import Pool
from tests.training import shard, whole

pytestmark = ranks_without_updates

COUNTS = [0, 4, 2]


def every_step(metric: Any) -> joinables.Metric:
    return joinables.Metric(metric, every_step=True)


def make() -> dict[str, Any]:
    return {
        "mean": MeanMetric(),
        "auroc": BinaryAUROC(),
        "pearson": PearsonCorrCoef(),
        "collection": MetricCollection([MulticlassPrecision(3), MulticlassRecall(3), MulticlassAccuracy(3)]),
    }


def inputs(name: str, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if name == "mean":
        return (x,)
    if name == "auroc":
        return x.sigmoid(), torch.arange(len(x)) % 2
    return (y, x) if name == "pearson" else ((y > 0).long() + (y > 1), (x > 0).long() + (x > 1))


def samples(rank: int, epoch: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    size = 4 + (rank + step) % 3 * 2  # batches of different sizes
    x, y = batch(rank, epoch, step)
    return x.flatten()[:size], y.flatten()[:size]


def call(metrics: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> dict[str, float] | None:
    return flat({name: metric(*inputs(name, x, y)) for name, metric in metrics.items()})


def flat(values: dict[str, Any]) -> dict[str, float] | None:
    found: dict[str, float] = {}
    for name, value in values.items():
        if value is not None:
            found |= {key: float(each) for key, each in (value if isinstance(value, dict) else {name: value}).items()}
    return found or None


def alone(epoch: int) -> list[dict[str, float] | None]:
    """The values of one process, step by step, over the batches of the ranks that have one."""
    found = []
    for step in range(max(COUNTS)):
        parts = [samples(rank, epoch, step) for rank, count in enumerate(COUNTS) if step < count]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        found.append(call(make(), x, y))
    return found


def all_seen(epochs: int) -> dict[str, float] | None:
    """The values of one process over everything."""
    metrics = make()
    for epoch in range(epochs):
        for rank, count in enumerate(COUNTS):
            for step in range(count):
                for name, metric in metrics.items():
                    metric.update(*inputs(name, *samples(rank, epoch, step)))
    return flat({name: metric.compute() for name, metric in metrics.items()})


def near(values: Any) -> Any:
    return [pytest.approx(value, abs=1e-6) for value in values]


def test_values_of_every_step_and_of_the_block() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        metrics = make()
        for epoch in range(2):
            expected = alone(epoch)
            with Join([counter, *map(every_step, metrics.values())]):
                for step in range(COUNTS[collective.rank]):
                    assert call(metrics, *samples(collective.rank, epoch, step)) == near(expected)[step]
                    counter()
                    metrics["mean"].update(torch.empty(0))
                    if step == 0 and epoch == 0:
                        own, mine = MeanMetric(), samples(collective.rank, epoch, step)[0]
                        assert metrics["mean"].compute() == own(mine)  # what is accumulated is this rank's
            assert flat({name: each.compute() for name, each in metrics.items()}) == near([all_seen(epoch + 1)])[0]

    on_threads(3, body)


@pytest.mark.parametrize("dummy", ["empty", "last"])
def test_ranks_in_lockstep_get_the_value_with_a_dummy_too(dummy: Any) -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        metrics, expected, found = make(), alone(0), []
        loader = [samples(collective.rank, 0, step) for step in range(COUNTS[collective.rank])]
        with Join([counter, *map(every_step, metrics.values())]) as join:
            for x, y in join.iterate(loader, dummy=dummy):
                counter()
                found.append(call(metrics, x, y))
        assert found == near(expected)
        assert flat({name: each.compute() for name, each in metrics.items()}) == near([all_seen(1)])[0]

    on_threads(3, body)


def test_a_batch_without_samples_takes_part_with_nothing() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        metric = MeanMetric()
        with Join([counter, every_step(metric)]):
            found = [metric(torch.full((2 * (step + collective.rank > 1),), 1.0 + step)) for step in range(3)]
        return [each if each is None else each.item() for each in found], metric.update_count, metric.compute().item()

    whole = pytest.approx((2 + 3 + 3) / 3)
    assert on_threads(2, body) == [([None, 2.0, 3.0], 1, whole), ([None, 2.0, 3.0], 2, whole)]


def test_states_are_merged_of_those_that_have_any() -> None:
    class Largest(Metric):
        full_state_update = True

        def __init__(self) -> None:
            super().__init__()
            self.add_state("largest", torch.tensor(torch.nan), "max")  # a default that would not be neutral
            self.calls = 0

        def update(self, x: torch.Tensor) -> None:
            self.calls += 1
            self.largest = torch.fmax(self.largest, x.max())

        def compute(self) -> torch.Tensor:
            return self.largest

    def body(collective: ThreadCollective, counter: Counter) -> Any:
        metric = Largest()
        with Join([counter, every_step(metric)]):
            found = [metric(torch.tensor([step + 10.0 * collective.rank])) for step in range(collective.rank)]
        return [each.item() for each in found], metric.calls, metric.compute().item()

    assert on_threads(3, body) == [([], 0, 21.0), ([20.0], 1, 21.0), ([20.0, 21.0], 2, 21.0)]


@pytest.mark.parametrize("order", ["metric first", "metric last"])
def test_declared_steps(order: str) -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        metric, leading, found = SumMetric(), Leading(collective), []
        first, second = (metric, leading) if order == "metric first" else (leading, metric)
        with Join([each if each is leading else every_step(each) for each in (first, second)], steps=collective.rank):
            for _ in range(collective.rank):
                for each in (first, second):
                    value = each() if each is leading else found.append(metric(1.0).item())
                    assert value is None
        return found, metric.compute().item()

    assert on_threads(3, body) == [([], 3.0), ([2.0], 3.0), ([2.0, 1.0], 3.0)]


def test_declared_steps_in_another_order_than_listed() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        metric, leading = SumMetric(), Leading(collective)
        told = "ran SumMetric in step 1 where leading was due; with steps=, each step runs every joinable of the list"
        with pytest.raises(JoinError, match=told), Join([leading, every_step(metric)], steps=1):
            metric(1.0)
        assert counter.reduce(1) == 2

    on_threads(2, body)


def test_no_metric_of_a_collection_is_taken_for_another() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        both = MetricCollection({"all": MulticlassAccuracy(3), "not 0": MulticlassAccuracy(3, ignore_index=0)})
        with Join([counter, every_step(both)]):
            for target in ([1, 2], [0, 1]):  # the first batch is the same to both
                value = both(torch.tensor([1, 1]), torch.tensor(target))
        return [{name: each.item() for name, each in values.items()} for values in (value, both.compute())]

    single = MetricCollection({"all": MulticlassAccuracy(3), "not 0": MulticlassAccuracy(3, ignore_index=0)})
    for target in ([1, 2], [0, 1]):
        value = single(torch.tensor([1, 1] * 2), torch.tensor(target * 2))
    expected = [{name: each.item() for name, each in values.items()} for values in (value, single.compute())]
    assert expected[0]["all"] != expected[0]["not 0"]
    for found in on_threads(2, body):
        assert [pytest.approx(each) for each in expected] == found


def test_groups_of_a_collection_that_update_has_made_stay() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        both, found = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)]), []
        guesses, classes = torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2, 2, collective.rank])
        with Join([counter, every_step(both)]):
            for _ in range(1 + collective.rank):
                both.update(guesses, classes)
                found.append({name: each.item() for name, each in both(guesses, classes).items()})
        groups = {frozenset(names) for names in both.compute_groups.values()}
        assert groups == {frozenset({"MulticlassPrecision", "MulticlassRecall"})}
        return found, {name: each.item() for name, each in both.compute().items()}

    single = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)], compute_groups=False)
    seen = [(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 2, 2, rank])) for rank in range(2)]
    guesses, classes = (torch.cat(each) for each in zip(*seen, strict=True))
    steps = [{k: pytest.approx(v.item()) for k, v in single(*each).items()} for each in ((guesses, classes), seen[1])]
    single.reset()
    for rank, times in ((0, 2), (1, 4)):
        for _ in range(times):
            single.update(*seen[rank])
    whole = {name: pytest.approx(each.item()) for name, each in single.compute().items()}
    assert on_threads(2, body) == [(steps[:1], whole), (steps, whole)]


def test_wrappers_and_compositions() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        left, right = SumMetric(), SumMetric()
        ratio = left / right
        bounds, classes = MinMaxMetric(MeanMetric()), ClasswiseWrapper(MulticlassAccuracy(2, average=None))
        with Join([counter, *map(every_step, (bounds, classes))]):
            for step in range(collective.rank):
                value = bounds(float(step)), classes(torch.tensor([0, 1]), torch.tensor([0, 0]))
                assert value[0]["raw"] == step
                assert [each.item() for each in value[1].values()] == [0.5, 0.0]
        with Join([counter, every_step(MetricCollection({"ratio": ratio}))]):
            pass
        found = bounds.compute(), classes.compute()
        assert found[0]["min"] == found[0]["max"] == found[0]["raw"]  # of what was computed of the whole
        return found[0]["raw"].item(), [each.item() for each in found[1].values()]

    assert on_threads(3, body) == [(pytest.approx(1 / 3), [0.5, 0.0])] * 3


def test_a_batch_that_cannot_be_taken_does_not_count() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        metric, told = MulticlassAccuracy(3), ""
        try:
            with Join([counter, every_step(metric)]):
                metric(torch.tensor([1]), torch.tensor([1]))
                metric(torch.tensor([1]), torch.tensor([1, 1][: 1 + (collective.rank == 1)]))
        except (ValueError, PeerError) as error:
            told = f"{type(error).__name__}: {error}"
        assert counter.reduce(1) == 3
        assert metric.update_count == 1 + (collective.rank != 1)
        return told

    first, second, third = on_threads(3, body)
    assert second.startswith("ValueError: ")
    assert first == third == f"PeerError: rank 1 failed: {second}"


def test_a_rank_that_fails_in_lockstep() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> str:
        metric = SumMetric()
        try:
            with Join([counter, every_step(metric)]) as join:
                for step, x in enumerate(join.iterate([torch.ones(1)] * (4 * collective.rank))):
                    counter()
                    if step == 1 and collective.rank == 1:
                        raise KeyError("enough")
                    metric(x)
        except (KeyError, PeerError) as error:
            return f"{type(error).__name__}: {error}"
        return "fine"

    first, second, third = on_threads(3, body)
    assert second == "KeyError: 'enough'"
    assert first == third
    assert first.startswith(f"PeerError: rank 1 failed: {second}")


def test_ranks_that_do_not_call_at_the_same_places() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        metric = SumMetric()
        with pytest.raises(ProtocolError, match="1 x Counter, 1 x SumMetric"), Join([counter, every_step(metric)]):
            counter() if collective.rank else metric(1.0)
        assert counter.reduce(1) == 2

    on_threads(2, body)


def test_ranks_that_hold_different_metrics() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        both = MetricCollection([SumMetric(), MaxMetric()][: 1 + collective.rank])
        told = "rank 0: SumMetric; rank 1: SumMetric, MaxMetric"
        with pytest.raises(ValueError, match=told), Join([counter, every_step(both)]):
            both(1.0)
        assert counter.reduce(1) == 2

    on_threads(2, body)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_a_copy_is_in_no_block(duplicate: Any) -> None:
    def body(collective: ThreadCollective, counter: Counter) -> Any:
        metric = SumMetric()
        before = set(vars(metric))
        with Join([counter, every_step(metric)]):
            assert metric(1.0) == 2
            other = duplicate(metric)
            assert other(10.0) == 10
        assert set(vars(metric)) == before
        assert metric(1.0) == 1  # and after the block, the metric is the rank's own again
        return other.compute().item()

    assert on_threads(2, body) == [11.0] * 2


def train(rank: int, name: str, dummy: Any, with_metrics: bool) -> tuple[Any, list[Any], list[Any]]:
    model = shard() if name == "sharded" else DistributedDataParallel(build(name))
    optimizer = torch.optim.Adam(model.parameters())
    metrics, found, outputs = make(), [], []
    listed = [every_step(each) for each in metrics.values()] if with_metrics else []
    loader = [batch(rank, 0, step) for step in range(COUNTS[rank])]
    with Join([model, optimizer, *listed], divide_by_initial_world_size=False) as join:
        for x, y in join.iterate(loader, dummy=dummy) if dummy else loader:
            optimizer.zero_grad()
            output = model(x)
            if with_metrics:
                seen = output.detach().flatten(), y.flatten()
                found.append(call(metrics, *seen))
                outputs += [] if join.shadowing else [seen]
            ((output - y) ** 2).mean().backward()
            optimizer.step()
    if with_metrics:
        found.append(flat({key: each.compute() for key, each in metrics.items()}))
    return flat_state(whole(model.state_dict()), whole(optimizer.state_dict())), found, outputs


@pytest.mark.parametrize(
    ("name", "dummy"),
    [("mlp", None), ("norm", None), ("sharded", None), ("mlp", "empty"), ("norm", "last"), ("sharded", "empty")],
)
def test_between_the_forward_and_the_backward_of_a_module(pool: Pool, name: str, dummy: Any) -> None:
    results = pool.run(train, name, dummy, True, ranks=3)
    plain = pool.run(train, name, dummy, False, ranks=3)
    metrics, expected = make(), []
    for step in range(max(COUNTS)):
        parts = [outputs[step] for _, _, outputs in results if step < len(outputs)]
        expected.append(call(metrics, *(torch.cat(each) for each in zip(*parts, strict=True))))
    whole = flat({key: each.compute() for key, each in metrics.items()})
    for count, (state, found, outputs), (state_without, _, _) in zip(COUNTS, results, plain, strict=True):
        assert_same(state, state_without)
        assert len(outputs) == count
        assert found == near([*expected[: max(COUNTS) if dummy else count], whole])


def declared(rank: int, name: str, between: bool, metric_first: bool) -> tuple[str, list[float], dict[str, Any]]:
    ddp, metric, told = DistributedDataParallel(build(name)), MeanMetric(), ""
    found: list[float] = []
    listed = [every_step(metric), ddp] if metric_first else [ddp, every_step(metric)]
    try:
        with Join(listed, steps=COUNTS[rank], divide_by_initial_world_size=False):
            for step in range(COUNTS[rank]):
                ddp.zero_grad()
                output = ddp(batch(rank, 0, step)[0])
                if between:
                    found.append(metric(float(rank)).item())
                output.sum().backward()
                if not between:
                    found.append(metric(float(rank)).item())
                with torch.no_grad():
                    for parameter in ddp.parameters():
                        parameter -= 0.01 * parameter.grad  # pyright: ignore[reportOperatorIssue]
    except JoinError as error:
        told = str(error)
    return told, found, flat_state(ddp.state_dict())


def test_declared_steps_with_a_module(pool: Pool) -> None:
    values = [1.5, 1.5, 1.0, 1.0]
    states: list[Any] = []
    for name, between in (("mlp", True), ("mlp", False), ("norm", False)):
        results = pool.run(declared, name, between, between, ranks=3)
        assert [(told, found) for told, found, _ in results] == [("", values[:count]) for count in COUNTS]
        states.append([state for _, _, state in results])
    for first, second in zip(*states[:2], strict=True):
        assert_same(first, second)


@pytest.mark.parametrize(
    ("name", "metric_first", "text"),
    [
        ("mlp", False, "ran MeanMetric in step 1 where the backward of DistributedDataParallel(MLP) was due"),
        ("norm", True, "ran the backward of DistributedDataParallel(Norm) in step 1 where MeanMetric was due"),
        ("norm", False, "call what announces in between after the backward"),
    ],
)
def test_what_declared_steps_cannot_do(ending: Ending, name: str, metric_first: bool, text: str) -> None:
    for told, _, _ in ending.run(declared, name, True, metric_first):
        assert text in told
