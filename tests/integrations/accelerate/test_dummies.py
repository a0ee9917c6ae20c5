"""Loop bodies that look at their losses, gather, or save: what Accelerate is asked is told as of the batch in hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from join import JoinError
from tests.harness import Pool
from tests.integrations.accelerate.training import COUNTS, RANKS, Case, batches_of, objects, state_of
from tests.integrations.ranks import accelerator, imported, launched
from tests.sync_norm import CPUSyncBatchNorm, sync_batch_norm_on_cpu
from tests.training import assert_same, batch, build

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install joinables[accelerate]")


def train(rank: int, skipped: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Train, and raise where the loss is not finite; batches of the steps ``skipped`` weigh nothing."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        model, optimizer, scheduler = accelerate.prepare(*objects())
        data = [(step, *each) for epoch in (0, 1) for step, each in enumerate(batches_of(Case(), rank, epoch))]
        with join_uneven_inputs(accelerate, [model, optimizer, scheduler]) as join:
            for _, x, y in join.iterate(data, weigh=lambda each: 0 if each[0] in skipped else len(each[1])):
                loss = ((model(x) - y) ** 2).mean()
                if not torch.isfinite(loss):
                    raise ValueError("the loss is not finite")
                optimizer.zero_grad()
                accelerate.backward(loss)
                optimizer.step()
        return state_of(accelerate.unwrap_model(model), optimizer, scheduler.scheduler)


@pytest.mark.parametrize("skipped", [(), (1,)])
def test_a_guard_against_nan_meets_none(pool: Pool, skipped: tuple[int, ...]) -> None:
    model, optimizer, scheduler = objects()
    ranks = [
        [(step, *each) for epoch in (0, 1) for step, each in enumerate(batches_of(Case(), rank, epoch))]
        for rank in range(RANKS)
    ]
    assert len(ranks[0]) != len(ranks[1]) or COUNTS
    for at in range(max(map(len, ranks))):
        window = [own[at] for own in ranks if at < len(own) and own[at][0] not in skipped]
        model.zero_grad()
        for _, x, y in window:
            (((model(x) - y) ** 2).mean() / len(window)).backward()
        for parameter in model.parameters():  # where all skip, a step of no gradient
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        optimizer.step()
    for state in pool.run(train, skipped, ranks=RANKS, timeout=40):
        assert_same(state, state_of(model, optimizer, scheduler), 1e-5)


# -- collectives ------------------------------------------------------------------------------------------------------


def reduce(rank: int, counts: tuple[int, ...]) -> list[Any]:
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate = accelerator()
        model = accelerate.prepare(build("mlp"))
        found: list[Any] = []
        total = torch.zeros(())
        with join_uneven_inputs(accelerate, [model]) as join:
            for step, x in enumerate(join.iterate([batch(rank, 0, step)[0] for step in range(counts[rank])])):
                loss = model(x).square().mean() * 0 + 10.0 * rank + step
                with pytest.raises(JoinError, match="is not a loss of step"):
                    accelerate.reduce(loss)  # backward has not received it
                accelerate.backward(loss)
                total += 0 if join.shadowing else loss.detach()
                values = [accelerate.reduce({"x": loss.detach()}, kind)["x"].item() for kind in ("sum", "max", "mean")]
                if rank == 0 and counts[0] == len(found):
                    accelerate.set_trigger()  # at the first dummy
                found.append([*values, accelerate.check_trigger(), accelerate.gradient_state.end_of_dataloader])
                assert accelerate.reduce(loss.detach().clone()).item() == values[0]
                for own in (total + 1, {"loss": loss, "total": total + 1}, loss.item(), torch.tensor(int(loss))):
                    with pytest.raises(JoinError, match=r"call torch\.distributed\.all_reduce\. \[J725\]"):
                        accelerate.reduce(own)
                with pytest.raises(JoinError, match=r"got one number as a row on each rank in step .* \[J765\]"):
                    accelerate.gather_for_metrics({"of the batch": loss, "own": total[None]})
                with pytest.raises(JoinError, match=r"Call accelerator\.gather_for_metrics, which does not"):
                    accelerate.gather(loss)
            for collective in (accelerate.reduce, accelerate.gather):
                with pytest.raises(JoinError, match="Ranks without data call accelerator"):
                    collective(torch.ones(1))
            with pytest.raises(JoinError, match=r"Ranks without data call accelerator\.reduce"):
                accelerate.check_trigger()
        assert {"gather", "reduce", "backward", "gradient_state"} & set(vars(accelerate)) == {"gradient_state"}
        assert accelerate.gather(torch.ones(1)).shape == (RANKS,)
        return [*found, accelerate.reduce(total).item()]


@pytest.mark.parametrize("counts", [(1, 3), (0, 2)])
def test_what_dummies_give_is_left_out(pool: Pool, counts: tuple[int, int]) -> None:
    """Of losses; other values may be sums over batches, which count on ranks without data too, and are refused."""
    expected: list[Any] = []
    for step in range(max(counts)):
        values = [10.0 * rank + step for rank in range(RANKS) if step < counts[rank]]
        is_last = step == max(counts) - 1
        expected.append([sum(values), max(values), sum(values) / len(values), step == counts[0], is_last])
    expected.append(sum(total for total, *_ in expected))
    assert pool.run(reduce, counts, ranks=RANKS) == [expected] * RANKS


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "float": lambda loss: loss.float(),
    "half": lambda loss: loss.half(),
    "clone": lambda loss: loss.clone(),
    "mean": lambda loss: loss.mean(),
    "row": lambda loss: loss[None],
    "* 1": lambda loss: loss * 1,
    "/ 3": lambda loss: loss / 3,
    "rounded": lambda loss: loss.bfloat16().float(),
}


def reduce_forms(rank: int, counts: tuple[int, ...], dtype: torch.dtype) -> list[dict[str, float | None]]:
    """Reduce a loss in each form, and a sum of this rank's losses; ``None`` if that is refused."""
    from joinables.integrations.accelerate import join_uneven_inputs

    with launched():
        accelerate, net = accelerator(), build("mlp")
        model, optimizer = accelerate.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        found: list[dict[str, float | None]] = []
        total = torch.zeros(())
        with join_uneven_inputs(accelerate, [model, optimizer]) as join:
            for x, y in join.iterate([batch(rank, 0, step) for step in range(counts[rank])]):
                loss = ((model(x) - y) ** 2).mean().to(dtype)
                values = {f"{name}, with its graph": form(loss) for name, form in FORMS.items()}
                values |= {name: form(loss.detach()) for name, form in FORMS.items()}
                total += 0 if join.shadowing else loss.detach()
                accelerate.backward(loss)
                found.append({})
                for name, value in {**values, "total": total}.items():
                    try:
                        kind = "sum" if name == "total" else "mean"
                        found[-1][name] = float(accelerate.reduce({"in a dict": value}, kind)["in a dict"])
                    except JoinError as error:
                        assert "[J725]" in str(error)  # noqa: PT017
                        found[-1][name] = None
                optimizer.step()
                optimizer.zero_grad()
        return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(1, 3), (0, 2)])
def test_a_loss_is_known_in_any_form(pool: Pool, counts: tuple[int, int], dtype: torch.dtype) -> None:
    """As in one process, or refused: a multiple of a loss, and a sum over batches, unless both readings are equal."""
    net = build("mlp")
    optimizer, total, expected = torch.optim.SGD(net.parameters(), lr=0.1), 0.0, list[float]()
    ranks = pool.run(reduce_forms, counts, dtype, ranks=RANKS)
    for step, found in enumerate(ranks[0]):
        data = [batch(rank, 0, step) for rank in range(RANKS) if step < counts[rank]]
        losses = [((net(x) - y) ** 2).mean() for x, y in data]
        (sum(losses, torch.zeros(())) / len(losses)).backward()
        optimizer.step()
        optimizer.zero_grad()
        total += sum(loss.item() for loss in losses)
        expected.append(sum(loss.item() for loss in losses) / len(losses))
        refused = {name.partition(",")[0] for name, value in found.items() if value is None}
        assert refused - {"total"} == {"/ 3"} | ({"rounded"} if dtype is torch.float32 else set())
        assert ("total" in refused) == (step > 0 or 0 in counts)
        for name, value in found.items():
            if value is not None:
                rounding = 2e-2 if dtype is torch.bfloat16 else 2e-3
                assert value == pytest.approx(total if name == "total" else expected[step], rel=rounding), name
    assert len(expected) == max(counts)
    assert ranks[0] == ranks[1]


def train_with_norms(rank: int) -> dict[str, torch.Tensor]:
    from joinables.integrations.accelerate import join_uneven_inputs

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), CPUSyncBatchNorm(3))
    with launched(), sync_batch_norm_on_cpu():
        accelerate = accelerator()
        model, optimizer = accelerate.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        data = [batch(rank, 0, step)[0] for step in range((1, 3)[rank])]
        with join_uneven_inputs(accelerate, [model, optimizer]) as join:
            for x in join.iterate(data, weigh=len):
                assert len(x) == 0 if join.shadowing else len(x)
                optimizer.zero_grad()
                accelerate.backward(model(x).square().mean())
                optimizer.step()
    return net.state_dict()


def test_dummies_are_empty_where_ranks_compute_together(pool: Pool) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        net(
            torch.cat([batch(rank, 0, step)[0] for rank in range(RANKS) if step < (1, 3)[rank]])
        ).square().mean().backward()
        optimizer.step()
    for state in pool.run(train_with_norms, ranks=RANKS):
        assert_same(state, net.state_dict(), 1e-5)


# -- the place in the data --------------------------------------------------------------------------------------------


def ahead(loader: Iterable[Any]) -> Iterator[Any]:
    yield from loader


def read(rank: int, folder: str, save: str, count: int) -> list[list[float]]:
    """What a rank reads of samples that it shares with the other: before a checkpoint, and after it."""
    from joinables.integrations.accelerate import join_uneven_inputs

    found: list[list[float]] = []
    with launched():
        data = imported("accelerate").DataLoaderConfiguration(use_stateful_dataloader=True, even_batches=False)
        accelerate = accelerator(dataloader_config=data)
        net = torch.nn.Linear(1, 1)
        samples: Any = torch.arange(float(count))[:, None]
        model, loader = accelerate.prepare(net, DataLoader(samples, batch_size=1))
        for stop in (2, -1):
            found.append([])
            with join_uneven_inputs(accelerate, [model]) as join:
                source = ahead(loader) if count == 11 and save == "refused" else loader
                for step, x in enumerate(join.iterate(source), 1):
                    found[-1] += [] if join.shadowing else x.flatten().tolist()
                    if step == stop:
                        if save == "inside":
                            accelerate.save_state(folder)
                        if save == "refused":
                            with pytest.raises(JoinError, match="save_state saves one loader state for all ranks"):
                                accelerate.save_state(folder)
                        break
                if save == "refused" and count == 11:  # the wrapped loader is ahead of the loop that was left
                    with pytest.raises(JoinError, match="save_state saves one loader state for all ranks"):
                        accelerate.save_state(folder)
            if stop == 2:
                if save == "after":
                    accelerate.save_state(folder)
                if save == "refused":
                    break
                accelerate.wait_for_everyone()
                accelerate.load_state(folder)
    return found


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [11, 6, 4])
@pytest.mark.parametrize("save", ["inside", "after"])
def test_a_checkpoint_has_the_place_of_the_batch_in_hand(pool: Pool, tmp_path: Path, save: str, count: int) -> None:
    pytest.importorskip("torchdata")
    ranks = pool.run(read, str(tmp_path), save, count, ranks=RANKS)
    for rank, (before, after) in enumerate(ranks):
        own = [float(sample) for sample in range(rank, count, RANKS)]
        assert before == own[:2]
        assert after == (own if count == 4 else own[2:])  # once all are at their end, loaders begin anew


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("count", [11, 5, 1])
def test_places_that_accelerate_cannot_save(pool: Pool, tmp_path: Path, count: int) -> None:
    """Something else reads the loader; or one rank is at its end, or without data, and Accelerate has one file."""
    pytest.importorskip("torchdata")
    pool.run(read, str(tmp_path), "refused", count, ranks=RANKS)
