"""torchmetrics over uneven ranks: the value of one process, each sample once, and nothing sent inside the block."""

from __future__ import annotations

import copy
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import MaxMetric, MeanMetric, MeanSquaredError, Metric, MetricCollection, MetricTracker, SumMetric
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy, MulticlassPrecision, MulticlassRecall
from torchmetrics.regression import PearsonCorrCoef
from torchmetrics.wrappers import ClasswiseWrapper, MinMaxMetric, Running

from join import Join
from join.collectives import SingleCollective, ThreadCollective, run_threads
from join.registry import joinables_of
from joinables.metrics import MetricAtEnd
from joinables.state import ModuleState
from tests.harness import Pool, all_or_each
from tests.join.counter import Counter
from tests.training import batch, build, shard

# torchmetrics knows nothing of what other ranks have seen: as after its own synchronisation.
ranks_without_updates = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")
pytestmark = ranks_without_updates

EPOCHS = [[0, 4, 2], [3, 0, 1], [0, 2, 0]]
RESET_AFTER = 1


def make() -> dict[str, Any]:
    return {
        "mean": MeanMetric(),
        "max": MaxMetric(),
        "accuracy": MulticlassAccuracy(3, average="micro"),
        "auroc": BinaryAUROC(),
        "pearson": PearsonCorrCoef(),
        "collection": MetricCollection([MulticlassPrecision(3), MulticlassRecall(3), MulticlassAccuracy(3)]),
    }


def see(metrics: dict[str, Any], rank: int, epoch: int, step: int) -> None:
    size = 1 + (rank + step) % 3 * 2  # batches of different sizes
    x, y = (tensor.flatten() for tensor in batch(rank, epoch, step))
    classes, guesses = (x[:size] > 0).long() + (x[:size] > 1), (y[:size] > 0).long() + (y[:size] > 1)
    metrics["mean"].update(x[:size])
    metrics["max"].update(x[:size])
    metrics["accuracy"].update(guesses, classes)
    metrics["auroc"].update(y[:size].sigmoid(), (x[:size] > 0).long())
    metrics["pearson"].update(y[:size], x[:size])
    metrics["collection"](guesses, classes)  # forward, for a change


def values(metrics: dict[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, metric in metrics.items():
        value = metric.compute()
        found |= {key: float(each) for key, each in (value if isinstance(value, dict) else {name: value}).items()}
    return found


def distributed(rank: int, kind: str, way: str) -> list[dict[str, float]]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a metric communicated by itself")

    gather, dist.all_gather = dist.all_gather, refuse
    metrics, results = make(), []
    model = shard() if kind == "sharded" else DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(model.parameters())
    try:
        for epoch, counts in enumerate(EPOCHS):
            listed = [model, optimizer, *metrics.values()]
            with Join(listed, divide_by_initial_world_size=False) as join:
                mine = range(counts[rank])
                for step in join.iterate(mine, dummy="last") if way == "lockstep" else mine:
                    optimizer.zero_grad()
                    loss = model(batch(rank, epoch, step)[0]).sum()
                    (join.scale(loss) if kind == "sharded" else loss).backward()
                    optimizer.step()
                    see(metrics, rank, epoch, step)
                    if not join.shadowing:
                        own = metrics["mean"].compute()
                        metrics["mean"].update(own.new_empty(0))
                        assert own == metrics["mean"].compute()
            results.append(values(metrics))
            assert results[-1] == values(metrics)  # and again
            if epoch == RESET_AFTER:
                for metric in metrics.values():
                    metric.reset()
    finally:
        dist.all_gather = gather
    return results


def alone() -> Iterator[dict[str, float]]:
    metrics = make()
    for epoch, counts in enumerate(EPOCHS):
        for rank, count in enumerate(counts):
            for step in range(count):
                see(metrics, rank, epoch, step)
        yield values(metrics)
        if epoch == RESET_AFTER:
            for metric in metrics.values():
                metric.reset()


ROWS = product(("ddp", "sharded"), ("plain", "lockstep"))


@pytest.mark.parametrize(("kind", "way"), all_or_each(ROWS, together=1))
def test_values_are_those_of_one_process(pool: Pool, kind: str, way: str) -> None:
    expected = list(alone())
    for results in pool.run(distributed, kind, way, ranks=3):
        for result, each in zip(results, expected, strict=True):
            assert result.keys() == each.keys()
            assert result == pytest.approx(each, abs=1e-6)


def afterwards(rank: int) -> list[float]:
    """What a metric does by itself once the block is over: its own synchronisation, over what the ranks hold."""
    ddp, metric = DistributedDataParallel(build("mlp")), SumMetric()
    with Join([ddp, metric]):
        for _ in range(rank):
            metric.update(1.0)
    merged = metric.compute().item()
    metric.update(10.0)
    return [merged, metric.compute().item()]


def test_updates_after_the_block_count_once_in_torchmetrics_own_synchronisation(pool: Pool) -> None:
    assert pool.run(afterwards, ranks=3) == [[3.0, 33.0]] * 3


def on_threads(ranks: int, body: Callable[[ThreadCollective, Counter], Any]) -> list[Any]:
    return run_threads(ranks, lambda collective: body(collective, Counter(collective)))


class Every(Metric):
    """A state of each kind."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sum", torch.zeros(2), "sum")
        self.add_state("mean", torch.tensor(0.0), "mean")
        self.add_state("max", torch.tensor(-torch.inf), "max")
        self.add_state("min", torch.tensor(torch.nan), "min")
        self.add_state("cat", [], "cat")
        self.add_state("rows", torch.zeros(0, 2), "cat")
        self.add_state("listed", [], None)
        self.add_state("stacked", torch.tensor(0, dtype=torch.int64), None)
        self.add_state("product", torch.tensor(1.0), lambda stacked: stacked.prod(0))

    def update(self, x: torch.Tensor) -> None:
        self.sum += x.sum()
        self.mean = (self.mean * (self.update_count - 1) + x.mean()) / self.update_count
        self.max = torch.maximum(self.max, x.max())
        self.min = torch.fmin(self.min, x.min())
        self.cat.append(x)  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        self.rows = torch.cat([self.rows, x[:1].expand(1, 2)])
        self.listed.append(x[:1])  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        self.stacked += len(x)
        self.product = self.product * x.prod()

    def compute(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name).tolist() for name in ("sum", "mean", "max", "min", "rows", "stacked")},
            "cat": torch.cat(list(self.cat)).tolist(),  # pyright: ignore[reportArgumentType]
            "listed": [each.item() for each in self.listed],  # pyright: ignore[reportGeneralTypeIssues]
            "product": self.product.item(),
            "updates": self.update_count,
        }


def test_states_of_every_kind() -> None:
    seen = {0: [[1.0, 2.0]], 1: [], 2: [[3.0], [4.0], [5.0, 6.0, 7.0]]}

    def body(collective: ThreadCollective, counter: Counter) -> tuple[Any, ...]:
        metric = Every()
        with Join([counter, metric]):
            for x in seen[collective.rank]:
                metric.update(torch.tensor(x))
        return metric.compute(), metric.update_count, metric.sum.tolist(), metric.mean.item()  # pyright: ignore[reportAttributeAccessIssue]

    own = {0: (1, [3.0, 3.0], 1.5), 1: (0, [0.0, 0.0], 0.0), 2: (3, [25.0, 25.0], pytest.approx(13 / 3))}
    for rank, (value, *left) in enumerate(on_threads(3, body)):
        assert tuple(left) == own[rank]
        assert value == {
            "sum": [28.0, 28.0],
            "mean": pytest.approx((1.5 + 3 + 4 + 6) / 4),
            "max": 7.0,
            "min": 1.0,
            "cat": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0],
            "rows": [[1.0, 1.0], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0]],
            "listed": [1.0, 3.0, 4.0, 5.0],
            "stacked": [2, 5],
            "product": 5040.0,
            "updates": 4,
        }


def test_no_sample_counts_twice() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> list[float]:
        metric, found = SumMetric(), []
        for epoch in (1, 2):
            with Join([counter, metric]):
                for _ in range(collective.rank * epoch):
                    metric(1.0)
            found.append(metric.compute().item())
        metric.update(100.0)  # between two blocks
        assert metric.compute().item() == 100.0 + 3 * collective.rank
        with Join([counter, metric]):
            assert metric.compute().item() == 100.0 + 3 * collective.rank  # local inside
        found.append(metric.compute().item())
        with Join([counter, metric]):
            metric.reset()
            if collective.rank == 1:
                metric.update(5.0)
        return [*found, metric.compute().item()]

    assert on_threads(3, body) == [[3.0, 9.0, 309.0, 5.0]] * 3


def test_the_last_value_is_not_taken_for_this_ranks_inside_the_next_block() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> tuple[float, float]:
        metric = SumMetric()
        with Join([counter, metric]):
            metric.update(1.0)
        merged = metric.compute().item()
        with Join([counter, metric]):
            return merged, metric.compute().item()

    assert on_threads(2, body) == [(2.0, 1.0)] * 2


def test_forward_gives_this_ranks_batch_value() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> tuple[list[float], float]:
        metric, own = MeanMetric(), []
        with Join([counter, metric]):
            for step in range(collective.rank):
                own.append(metric(10.0 * collective.rank + step).item())
        return own, metric.compute().item()

    assert on_threads(3, body) == [([], 17.0), ([10.0], 17.0), ([20.0, 21.0], 17.0)]


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_batches_without_samples_are_skipped(forward: bool, full: bool) -> None:
    class Average(Metric):
        full_state_update = full

        def __init__(self) -> None:
            super().__init__()
            self.add_state("mean", torch.tensor(0.0), "mean")

        def update(self, x: torch.Tensor) -> None:
            self.mean = (self.mean * (self.update_count - 1) + x.mean()) / self.update_count

        def compute(self) -> torch.Tensor:
            return self.mean

    def body(collective: ThreadCollective, counter: Counter) -> tuple[Any, ...]:
        metric, auroc = Average(), MetricCollection([BinaryAUROC()])
        with Join([counter, metric, auroc]):
            for step in range(3):
                x = torch.full((2,), float(step + 1))[: 2 * (step < collective.rank)]
                (metric if forward else metric.update)(x)
                result = (auroc if forward else auroc.update)(preds=x / 10, target=torch.arange(len(x)))
                assert result is None or len(x)
        return metric.compute().item(), metric.update_count, auroc.compute()["BinaryAUROC"].item()

    expected = [(pytest.approx(4 / 3), rank, pytest.approx(0.5)) for rank in range(3)]
    assert on_threads(3, body) == expected


def test_an_exception_leaves_the_metric_as_it_was() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> float:
        metric = MetricCollection([SumMetric()])
        before = {name: vars(each) | {} for name, each in metric.named_modules()}
        with pytest.raises(KeyError), Join([counter, metric]):
            metric.update(1.0 + collective.rank)
            raise KeyError("enough")
        for name, each in metric.named_modules():
            assert vars(each).keys() == before[name].keys()
        part = metric["SumMetric"]
        assert part.distributed_available_fn is before["SumMetric"]["distributed_available_fn"]
        assert part.update_count == 1
        return metric.compute()["SumMetric"].item()

    assert on_threads(2, body) == [1.0, 2.0]


def test_a_block_puts_back_what_it_has_replaced() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        for metric in (SumMetric(), MetricCollection([SumMetric()])):
            before = {name: set(vars(each)) for name, each in metric.named_modules()}
            update = metric.update
            with Join([counter, metric]):
                metric.update(1.0)
            assert {name: set(vars(each)) for name, each in metric.named_modules()} == before
            assert metric.update == update

    on_threads(2, body)


@pytest.mark.parametrize("make_metric", [SumMetric, lambda: MetricCollection([SumMetric()])])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda metric: pickle.loads(pickle.dumps(metric))])
def test_a_copy_is_in_no_block(make_metric: Any, duplicate: Any) -> None:
    def body(collective: ThreadCollective, counter: Counter) -> tuple[float, ...]:
        metric = make_metric()
        original = next(each for each in metric.modules() if isinstance(each, Metric)).distributed_available_fn
        with Join([counter, metric]):
            metric.update(1.0)
            other = duplicate(metric)
            other.update(10.0)
            (part,) = [each for each in other.modules() if isinstance(each, Metric)]
            assert part.distributed_available_fn is original
            other(torch.tensor([100.0]))
            other.update(torch.empty(0))
            assert part.update_count == 4  # nothing is skipped
        numbers = [
            each if isinstance(each := m.compute(), torch.Tensor) else each["SumMetric"] for m in (metric, other)
        ]
        return numbers[0].item(), numbers[1].item()

    assert on_threads(2, body) == [(2.0, 111.0)] * 2


@pytest.mark.parametrize("dummy", ["empty", "last"])
def test_dummies_do_not_count(dummy: Any) -> None:
    def body(collective: ThreadCollective, counter: Counter) -> float:
        metric = SumMetric()
        with Join([counter, metric]) as join:
            for x in join.iterate([torch.tensor([1.0 + collective.rank])] * (2 * collective.rank), dummy=dummy):
                metric.update(x)
                counter()
        return metric.compute().item()

    assert on_threads(2, body) == [4.0, 4.0]


def test_nobody_has_data() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        metric = MeanMetric()
        with Join([counter, metric]):
            counter()
        assert not metric.update_called

    on_threads(2, body)


def test_a_state_that_was_loaded_counts() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> float:
        metric = SumMetric()
        metric.persistent(True)
        if collective.rank == 1:
            metric.load_state_dict({"sum_value": torch.tensor(40.0)})
        with Join([counter, metric]):
            if collective.rank == 0:
                metric.update(2.0)
        return metric.compute().item()

    assert on_threads(3, body) == [42.0] * 3


def test_wrappers_and_compositions() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> tuple[Any, ...]:
        left, right = SumMetric(), SumMetric()
        ratio = left / right
        bounds, classes = MinMaxMetric(MeanMetric()), ClasswiseWrapper(MulticlassAccuracy(2, average=None))
        with Join([counter, ratio, bounds, classes]):
            for step in range(collective.rank):
                left.update(3.0)
                right.update(2.0)
                bounds.update(float(step))
                classes.update(torch.tensor([0, 1]), torch.tensor([0, 0]))
        found = bounds.compute(), classes.compute()
        return ratio.compute().item(), found[0]["raw"].item(), [each.item() for each in found[1].values()]

    assert on_threads(3, body) == [(1.5, pytest.approx(1 / 3), [0.5, 0.0])] * 3


def test_extremes_are_those_of_all_ranks() -> None:
    """``MinMaxMetric`` keeps them in plain attributes, which ``forward`` writes, too."""

    def body(collective: ThreadCollective, counter: Counter) -> tuple[float, ...]:
        bounds = MinMaxMetric(MeanMetric())
        with Join([counter, bounds]):
            for step in range(collective.rank):
                bounds(10.0 * collective.rank + step)
        found = bounds.compute()
        return found["min"].item(), found["max"].item()

    assert on_threads(3, body) == [(10.0, 21.0)] * 3


def test_one_process() -> None:
    collective = SingleCollective()
    metric = MeanSquaredError()
    with Join([Counter(collective), metric]):
        metric.update(torch.zeros(3), torch.ones(3))
    assert metric.compute() == 1.0


def test_what_cannot_be_merged_is_an_error() -> None:
    def synced() -> Any:
        metric = SumMetric(distributed_available_fn=lambda: True, dist_sync_fn=lambda tensor, group: [tensor])
        metric.update(1.0)
        metric.sync(dist_sync_fn=lambda tensor, group: [tensor])
        return metric

    makers = {
        r"SumMetric\(dist_sync_on_step=True\) communicates": lambda: SumMetric(dist_sync_on_step=True),
        r"SumMetric\(compute_with_cache=False\)": lambda: MetricCollection([SumMetric(compute_with_cache=False)]),
        "Call its unsync": synced,
        "Running has states that Join cannot merge": lambda: Running(SumMetric(), 2),
        "MetricTracker keeps the metrics of many epochs": lambda: MetricTracker(MeanSquaredError()),
    }
    for text, maker in makers.items():

        def body(collective: ThreadCollective, counter: Counter, text: str = text, maker: Any = maker) -> None:
            with pytest.raises((ValueError, TypeError), match=text), Join([counter, maker()]):
                pass
            assert counter.reduce(1) == 2

        on_threads(2, body)


def test_ranks_that_hold_different_metrics() -> None:
    def body(collective: ThreadCollective, counter: Counter) -> None:
        kinds = [SumMetric(), MaxMetric()][: 1 + collective.rank]
        told = "rank 0: SumMetric; rank 1: SumMetric, MaxMetric"
        with pytest.raises(ValueError, match=told), Join([counter, MetricCollection(kinds)]):
            pass
        assert counter.reduce(1) == 2

    on_threads(2, body)


def test_only_metrics_are_taken_for_metrics() -> None:
    assert [type(each) for each in joinables_of(SumMetric())] == [MetricAtEnd]
    assert [type(each) for each in joinables_of(MetricCollection([SumMetric()]))] == [MetricAtEnd]
    assert [type(each) for each in joinables_of(torch.nn.ModuleList([SumMetric()]))] == [ModuleState]


@pytest.mark.parametrize("of_others", [0, 1])
def test_a_rank_that_had_no_data_is_warned_by_torchmetrics(of_others: int) -> None:
    def body(collective: ThreadCollective, counter: Counter) -> float:
        metric = MaxMetric()
        with Join([counter, metric]):
            for _ in range(of_others * collective.rank):
                metric.update(1.0)
        return metric.compute().item()

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        values = on_threads(2, body)
    assert values == [1.0 if of_others else -math.inf] * 2
    assert ["before the ``update`` method" in str(each.message) for each in told] == [True] * (2 - of_others)
