"""What becomes of state at the end of a block, and of a loop over ``join.iterate``, against one process."""

from __future__ import annotations

import copy
import re
from collections import deque
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils import _pytree as pytree

from join import Join, JoinError, ProtocolError
from join.registry import joinables_of
from tests.ending import Ending
from tests.harness import ALL, Pool, all_or_each
from tests.training import TOLERANCE, assert_same, batch, build, flat_state, mesh_of

RANKS = 3
EPOCHS = ((1, 4, 0), (3, 0, 2))  # how many batches each rank has
PLAIN, ITERATE = "plain", "iterate"


def batches(join: Join, way: str, rank: int, epoch: int, count: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    mine = [batch(rank, epoch, step) for step in range(count)]
    return join.iterate(mine) if way == ITERATE else mine


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return ((model(x.to(dtype)) - y.to(dtype)) ** 2).mean()


def matrices() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))


# -- optimizers -------------------------------------------------------------------------------------------------------


class Wide(torch.optim.Optimizer):
    """Momentum in float32 for parameters of bfloat16, as Adafactor of Transformers has it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            momentum = self.state[parameter].setdefault("m", torch.zeros_like(parameter, dtype=torch.float32))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter.sub_((0.05 * momentum).to(parameter.dtype))


class Nested(torch.optim.Optimizer):
    """Shampoo's kind of state: dictionaries in dictionaries, lists, one tensor in two places, a key of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        group["weight_sum"] += 1.5  # as schedule-free optimizers have it
        calls = cast("Any", self.state).setdefault("groups", {"count": torch.zeros((), dtype=torch.int64)})
        calls["count"] += 1
        for parameter in group["params"]:
            state = self.state[parameter]
            if not state:
                shared = torch.zeros_like(parameter)
                state["block_0"] = {"factors": [torch.zeros(3), shared], "names": ("left", "right")}
                state["again"], state["history"] = shared, []
            block = state["block_0"]
            block["factors"][0] += 1
            block["factors"][1].mul_(0.5).add_(parameter.grad)
            state["history"] = [*state["history"], block["factors"][1].norm()][-3:]
            parameter.sub_(0.05 * state["again"])

    def state_dict(self) -> Any:
        raise NotImplementedError("use distributed_state_dict")


class Counting(torch.optim.Optimizer):
    """It counts its steps in an attribute, beside the number of its rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.count, self.rank = 0, dist.get_rank() if dist.is_initialized() else 0
        self.is_ready = False  # a rank without a step lacks the tensor that the flag speaks of

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not dist.is_initialized() or self.rank == dist.get_rank()
        self.count += 1
        if not self.is_ready:
            self.factor, self.is_ready = torch.tensor(0.1), True
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=self.factor.item() / self.count)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "amsgrad, tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
    "lbfgs": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=4),
    "wide": Wide,
    "nested": Nested,
    "counting": Counting,
}
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["muon"] = lambda params: torch.optim.Muon(params, lr=0.01)


def model_for(kind: str) -> torch.nn.Module:
    return matrices().bfloat16() if kind == "wide" else matrices()


def one_step(optimizer: torch.optim.Optimizer, compute: Callable[[], torch.Tensor]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        compute().backward()
        # The same on all ranks, unlike the loss: it decides how often LBFGS calls this.
        gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        return sum(gradient.square().sum().item() for gradient in gradients)

    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


def state_of(optimizer: torch.optim.Optimizer) -> dict[Any, Any]:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    index = {parameter: number for number, parameter in enumerate(parameters)}
    values = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"groups": values, "state": {str(index.get(key, key)): held for key, held in optimizer.state.items()}}


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def train(rank: int, kind: str, way: str) -> tuple[Any, ...]:
    ddp = DistributedDataParallel(model_for(kind))
    optimizer = OPTIMIZERS[kind](ddp.parameters())
    kept: list[bool] = []
    for epoch, counts in enumerate(EPOCHS):
        before = tensors_of(state_of(optimizer))
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in batches(join, way, rank, epoch, counts[rank]):
                optimizer.param_groups[0]["weight_decay"] = 0.01 * (epoch + 1)
                one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
        after = {id(tensor) for tensor in tensors_of(state_of(optimizer))}
        kept.append(all(id(tensor) in after for tensor in before))
    state = state_of(optimizer)
    dtypes = [tensor.dtype for tensor in tensors_of(state)]
    return flat_state(ddp.module.state_dict(), state), dtypes, kept


def one_process(kind: str) -> dict[str, torch.Tensor]:
    model = model_for(kind)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for epoch, counts in enumerate(EPOCHS):
        for step in range(max(counts)):
            data = [batch(rank, epoch, step) for rank in range(RANKS) if counts[rank] > step]
            optimizer.param_groups[0]["weight_decay"] = 0.01 * (epoch + 1)
            one_step(optimizer, lambda data=data: sum(loss_of(model, x, y) for x, y in data) / len(data))  # type: ignore[return-value]
    return flat_state(model.state_dict(), state_of(optimizer))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_after_an_uneven_block(pool: Pool, kind: str) -> None:
    """Rank 2 has no data at first, and rank 1 none in the second epoch."""
    results = pool.run(train, kind, PLAIN, ranks=RANKS)
    expected = one_process(kind)
    for state, dtypes, kept in results:
        assert_same(state, results[0][0])
        assert_same(state, expected, {"wide": 0.05, "muon": 1e-4, "lbfgs": 1e-2}.get(kind, 1e-5))
        assert dtypes == results[0][1]
        assert kept == [True, True] or kind in ("nested", "lbfgs")  # which make new tensors at each step
    if kind == "wide":
        assert torch.float32 in results[0][1]


@pytest.mark.parametrize("kind", OPTIMIZERS if ALL else ["adam", "lbfgs"])
def test_optimizers_after_a_loop(pool: Pool, kind: str) -> None:
    expected = one_process(kind)
    results = pool.run(train, kind, ITERATE, ranks=RANKS)
    for state, dtypes, _ in results:
        assert_same(state, results[0][0])
        assert dtypes == results[0][1]
        assert_same(state, expected, {"wide": 0.05, "muon": 1e-4, "lbfgs": 1e-2}.get(kind, 1e-5))


# -- what cannot be copied --------------------------------------------------------------------------------------------


class Owned(torch.optim.Optimizer):
    """Momentum SGD of which each rank steps some parameters and sends them to the others, as Muon's often is."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rank, world = dist.get_rank(), dist.get_world_size()
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            if index % world == rank:
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter.sub_(0.1 * momentum)
            dist.broadcast(parameter, index % world)


def owned(rank: int) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = Owned(ddp.parameters())
    for epoch, counts in enumerate(EPOCHS):
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in batches(join, ITERATE, rank, epoch, counts[rank]):
                one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
    return flat_state(ddp.module.state_dict())


def test_state_of_which_each_rank_has_a_part_after_a_loop(pool: Pool) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch, counts in enumerate(EPOCHS):
        for step in range(max(counts)):
            data = [batch(rank, epoch, step) for rank in range(RANKS) if counts[rank] > step]
            one_step(optimizer, lambda data=data: sum(loss_of(model, x, y) for x, y in data) / len(data))  # type: ignore[return-value]
    for state in pool.run(owned, ranks=RANKS):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


class Partly(torch.optim.SGD):
    """On rank 0, holds state for one parameter only; on others for all but that."""

    def step(self, closure: Any = None) -> Any:
        parameters = self.param_groups[0]["params"]
        for index, parameter in enumerate(parameters):
            if (index == 0) == (dist.get_rank() == 0):
                self.state[parameter]["mine"] = torch.ones(2)


class Subclass(torch.Tensor):
    """As a DTensor is, or a state of eight bits."""


class Packed(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["packed"] = torch.ones(2).as_subclass(Subclass)


class Shadowed:
    """An EMA copy whose tensors are of a subclass."""

    def __init__(self) -> None:
        self.loaded = False

    def state_dict(self) -> Any:
        return {"shadow": torch.ones(2).as_subclass(Subclass)}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = True


def add_group(optimizer: torch.optim.Optimizer, step: int, later: Any) -> None:
    if step == 2:
        optimizer.add_param_group({"params": list(later.parameters())})


def not_copied(rank: int, kind: str) -> tuple[str, Any]:
    model = matrices()
    ddp, listed = DistributedDataParallel(model), []
    optimizer: Any = torch.optim.Adam(model[2].parameters(), lr=0.01)
    if kind in ("partly", "packed"):
        optimizer = (Partly if kind == "partly" else Packed)(model.parameters(), lr=0.1)
    if kind == "shadow":
        listed = [Shadowed()]
    with pytest.raises(JoinError) as caught, Join([ddp, *listed, optimizer]):
        for step in range((1, 4, 3)[rank]):
            if kind == "group":
                add_group(optimizer, step, model[0])
            one_step(optimizer, lambda step=step: loss_of(ddp, *batch(rank, 0, step)))
    total = torch.ones(1)
    dist.all_reduce(total)  # nobody is left alone
    return str(caught.value), flat_state(state_of(optimizer) if kind != "packed" else {})


@pytest.mark.parametrize(
    ("kind", "name", "why"),
    [
        (
            "group",
            "Adam",
            r"on rank 0, it has parameter groups of shapes \[\[\(2, 8\)\]\], but the last rank with data",
        ),
        ("partly", "Partly", r"on rank 0, it has state for parameters \[0\] \(by index\)"),
        ("packed", "Packed", r"on rank 0, it holds a .* of type Subclass"),
        ("shadow", "Shadowed", r"it holds a torch\.strided tensor of type Subclass"),
    ],
)
def test_what_cannot_be_copied_is_an_error_on_all_ranks(pool: Pool, kind: str, name: str, why: str) -> None:
    for text, state in pool.run(not_copied, kind, ranks=RANKS):
        assert re.match(
            rf"The state of {name} cannot be copied .*{why}.*Loop over join.iterate, which copies no state", text
        )
        if kind == "group" and "0.state.1.step" not in state:
            assert state["0.state.0.step"].item() == 1  # nothing was copied on rank 0


def group_in_a_loop(rank: int) -> dict[str, torch.Tensor]:
    model = matrices()
    ddp, optimizer = DistributedDataParallel(model), torch.optim.Adam(model[2].parameters(), lr=0.01)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for step, (x, y) in enumerate(batches(join, ITERATE, rank, 0, (1, 4, 3)[rank])):
            add_group(optimizer, step, model[0])
            one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
    return flat_state(model.state_dict(), state_of(optimizer))


def test_a_parameter_group_that_is_added_in_a_loop(pool: Pool) -> None:
    model = matrices()
    optimizer = torch.optim.Adam(model[2].parameters(), lr=0.01)
    for step in range(4):
        add_group(optimizer, step, model[0])
        data = [batch(rank, 0, step) for rank in range(RANKS) if (1, 4, 3)[rank] > step]
        model.zero_grad()
        one_step(optimizer, lambda data=data: sum(loss_of(model, x, y) for x, y in data) / len(data))  # type: ignore[return-value]
    for state in pool.run(group_in_a_loop, ranks=RANKS):
        assert_same(state, flat_state(model.state_dict(), state_of(optimizer)), TOLERANCE)


def shards_and_their_average(rank: int) -> float:
    from torch.distributed.fsdp import fully_shard

    model = matrices()
    fully_shard(model, mesh=mesh_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Average:
        def __init__(self) -> None:
            self.shadow = {name: value.detach().clone() for name, value in model.named_parameters()}

        def state_dict(self) -> Any:
            return self.shadow

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError("nothing is to be copied")

    average = Average()
    with Join([model, optimizer, average], divide_by_initial_world_size=False) as join:
        for x, y in batches(join, ITERATE, rank, 0, (2, 1, 0)[rank]):
            one_step(optimizer, lambda x=x, y=y: join.scale(loss_of(model, x, y)))
            for name, value in model.named_parameters():
                average.shadow[name].lerp_(value.detach(), 0.1)
    return 0.0


def test_an_average_of_shards_after_a_loop(pool: Pool) -> None:
    assert pool.run(shards_and_their_average, ranks=RANKS) == [0.0] * RANKS


# -- nothing is copied, and what should be equal is compared ----------------------------------------------------------


class Unloadable:
    """State of each rank."""

    def state_dict(self) -> Any:
        return {"rank": dist.get_rank()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError("nothing is to be copied")


def untouched(rank: int, way: str, counts: tuple[int, ...]) -> bool:
    ddp = DistributedDataParallel(build("norm"))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with Join([ddp, optimizer, scheduler, scaler, Unloadable()], divide_by_initial_world_size=False) as join:
        for x, y in batches(join, way, rank, 0, counts[rank]):
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, x, y)).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
    assert way == PLAIN or join.report.steps == max(counts)
    assert scheduler.last_epoch == max(counts)
    return join.report.even


@pytest.mark.parametrize(("way", "counts"), [(PLAIN, (3, 3, 3)), (ITERATE, (3, 3, 3)), (ITERATE, (1, 3, 0))])
def test_nothing_is_copied(pool: Pool, way: str, counts: tuple[int, ...]) -> None:
    assert pool.run(untouched, way, counts, ranks=RANKS) == [len(set(counts)) == 1] * RANKS


def apart(rank: int, kind: str, way: str, counts: tuple[int, ...]) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    sgd, adam = torch.optim.SGD(ddp.parameters(), lr=0.1), torch.optim.Adam(ddp.parameters(), lr=0.1)
    optimizer = adam if kind == "adam" else sgd
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    with pytest.raises(ProtocolError) as caught, Join([ddp, optimizer, scheduler, scaler]) as join:
        for step, (x, y) in enumerate(batches(join, way, rank, 0, counts[rank])):
            loss = loss_of(ddp, x, y)
            optimizer.zero_grad()
            loss.backward()
            if not (join.shadowing and kind in ("adam", "sgd")):
                optimizer.step()
            if kind == "plateau":
                scheduler.step(float(step if rank else -step))
            if kind == "counter":
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + step + rank // 2)
            if kind == "scaler" and not join.shadowing:
                scaler.scale(loss)
                scaler.unscale_(optimizer)
                scaler.update()
    total = torch.ones(1)
    dist.all_reduce(total)
    return str(caught.value)


@pytest.mark.parametrize("way", [PLAIN, ITERATE])
@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("plateau", r"value \['lr'\] of parameter group 0 of SGD is 0.1 on rank 0, 0.0\d* on rank 1, 0.0\d* on rank 2"),
        ("plateau", r"\['best'\] of ReduceLROnPlateau is -2.0 on rank 0, 0.0 on rank 1"),
        (
            "counter",
            r"value \['lr'\] of parameter group 0 of SGD is 0.03\d* on rank 0, 0.03\d* on rank 1, 0.025 on rank 2",
        ),
        ("adam", r"step count of parameter 0 of Adam is 1.0 on rank 0, 3.0 on rank 1, 2.0 on rank 2"),
        ("sgd", r"number of steps made .* of SGD is 1 on rank 0, 3 on rank 1, 2 on rank 2"),
        ("scaler", r"\['scale'\] of GradScaler is 16.0 on rank 0, 64.0 on rank 1, 32.0 on rank 2"),
    ],
    ids=["rate", "plateau", "counter", "adam", "sgd", "scaler"],
)
def test_ranks_that_do_not_hold_the_same_are_an_error(pool: Pool, way: str, kind: str, what: str) -> None:
    depends_on_dummies = kind in ("adam", "sgd", "scaler")
    if depends_on_dummies and way == PLAIN:
        pytest.skip("no dummies in a plain block")
    counts = (1, 3, 2) if depends_on_dummies else (3, 3, 3)
    texts = pool.run(apart, kind, way, counts, ranks=RANKS)
    assert len(set(texts)) == 1
    assert re.search(what, texts[0]), texts[0]


def last_ones_apart(rank: int) -> str:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(JoinError) as caught, Join([ddp, optimizer]):
        for step in range((1, 3, 3)[rank]):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
            one_step(optimizer, lambda step=step: loss_of(ddp, *batch(rank, 0, step)))
    return str(caught.value)


def test_last_ranks_that_do_not_hold_the_same_are_an_error(pool: Pool) -> None:
    for text in pool.run(last_ones_apart, ranks=RANKS):
        assert re.search(r"the learning rate in step \d of the block of SGD is 0\.\d+ on rank", text)


def experts(rank: int) -> list[float]:
    """A parameter that DDP ignores is each rank's own, and so are its steps: none on a dummy."""
    model = matrices()
    model[1].expert = expert = torch.nn.Parameter(torch.full((2,), float(rank)))
    vars(model)["_ddp_params_and_buffers_to_ignore"] = ["1.expert"]
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    steps: list[float] = []
    for way in (ITERATE, PLAIN):
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in batches(join, way, rank, 0, (1, 3, 2)[rank]):
                optimizer.zero_grad()
                loss = loss_of(ddp, x, y)
                if not join.shadowing:
                    loss = loss + expert.square().sum()
                loss.backward()
                optimizer.step()
        steps.append(optimizer.state[expert]["step"].item())
    shared = {optimizer.state[each]["step"].item() for each in model.parameters() if each is not expert}
    assert shared == {6.0}
    return steps


def test_parameters_that_are_each_ranks_own(pool: Pool) -> None:
    assert pool.run(experts, ranks=RANKS) == [[1, 2], [3, 6], [2, 4]]


def loop_then_plain(rank: int) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for epoch, way in enumerate((ITERATE, PLAIN)):
            for x, y in batches(join, way, rank, epoch, EPOCHS[epoch][rank]):
                one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
    with pytest.raises(JoinError, match="J442"):  # the plain loop counts no steps
        _ = join.report.steps
    return flat_state(ddp.module.state_dict(), state_of(optimizer))


def test_state_is_copied_where_a_burst_was_shadowed_after_a_loop(pool: Pool) -> None:
    model = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch, counts in enumerate(EPOCHS):
        for step in range(max(counts)):
            data = [batch(rank, epoch, step) for rank in range(RANKS) if counts[rank] > step]
            one_step(optimizer, lambda data=data: sum(loss_of(model, x, y) for x, y in data) / len(data))  # type: ignore[return-value]
    for state in pool.run(loop_then_plain, ranks=RANKS):
        assert_same(state, flat_state(model.state_dict(), state_of(optimizer)), TOLERANCE)


# -- wrappers ---------------------------------------------------------------------------------------------------------


class Sam(torch.optim.Optimizer):
    """Steps twice, the second time by another optimizer that it holds."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups


def test_a_wrapper_that_does_not_hand_out_the_state_inside() -> None:
    sam = Sam(torch.nn.Linear(2, 2).parameters())
    with pytest.raises(TypeError, match=r"Sam contains the optimizer SGD in \.base_optimizer, but .* List"):
        joinables_of(sam)
    assert joinables_of(sam.base_optimizer)[0].join_target is sam.base_optimizer


class Lookahead(torch.optim.Optimizer):
    """Holds slow weights, and an optimizer for the fast ones; its state dict has both."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for parameter in self.param_groups[0]["params"]:
            slow = self.state[parameter].setdefault("slow", parameter.clone())
            slow.lerp_(parameter, 0.5)
            parameter.copy_(slow)

    def state_dict(self) -> Any:
        slow = [self.state[each].get("slow") for each in self.param_groups[0]["params"]]
        return {"fast": self.optimizer.state_dict(), "slow": slow}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["fast"])
        for parameter, slow in zip(self.param_groups[0]["params"], state["slow"], strict=True):
            self.state[parameter]["slow"] = slow


class WithOptimizersKeys(Lookahead):
    """Its ``state_dict`` has the entries of an optimizer's."""

    def state_dict(self) -> Any:
        return {"state": super().state_dict(), "param_groups": []}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["state"])


def looking_ahead(rank: int, kind: type[Lookahead]) -> dict[str, torch.Tensor]:
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = kind(torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9))
    with Join([ddp, optimizer], divide_by_initial_world_size=False):
        for step in range((1, 4, 0)[rank]):
            one_step(optimizer, lambda step=step: loss_of(ddp, *batch(rank, 0, step)))
    return flat_state(ddp.module.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("kind", [Lookahead, WithOptimizersKeys])
def test_a_wrapper_with_state_of_its_own(pool: Pool, kind: type[Lookahead]) -> None:
    model = build("mlp")
    optimizer = kind(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for step in range(4):
        data = [batch(rank, 0, step) for rank in range(RANKS) if (1, 4, 0)[rank] > step]
        one_step(optimizer, lambda data=data: sum(loss_of(model, x, y) for x, y in data) / len(data))  # type: ignore[return-value]
    for state in pool.run(looking_ahead, kind, ranks=RANKS):
        assert_same(state, flat_state(model.state_dict(), optimizer.state_dict()), TOLERANCE)


# -- buffers ----------------------------------------------------------------------------------------------------------


class DictAverage:
    """An EMA copy as a dictionary."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = copy.deepcopy(model.state_dict())

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module) -> None:
        buffers = dict(model.named_buffers())
        for name, value in model.state_dict().items():
            if name in buffers:
                self.shadow[name].copy_(value)
            else:
                self.shadow[name].lerp_(value, 0.5)

    def state_dict(self) -> Any:
        return {"decay": 0.5, "shadow": self.shadow}

    def load_state_dict(self, state: Any) -> None:
        self.shadow = state["shadow"]


class Queue:
    """The last average in a queue."""

    def __init__(self) -> None:
        self.kept = deque([torch.zeros(2)])

    def state_dict(self) -> Any:
        return {"kept": self.kept}

    def load_state_dict(self, state: Any) -> None:
        self.kept = state["kept"]


def queued(rank: int) -> None:
    ddp, queue = DistributedDataParallel(build("mlp")), Queue()
    with pytest.raises(ProtocolError, match="rows of the state of Queue"), Join([ddp, queue]):
        loss_of(ddp, *batch(rank, 0, 0)).backward()
        queue.kept[0] += rank


def test_an_average_in_a_queue_is_compared(pool: Pool) -> None:
    pool.run(queued, ranks=2)


def averaged(rank: int, way: str, counts: tuple[int, ...], as_dict: bool) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(build("norm"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    average: Any = DictAverage(ddp.module) if as_dict else AveragedModel(ddp.module)
    with Join([ddp, optimizer, average], divide_by_initial_world_size=False) as join:
        for x, y in batches(join, way, rank, 0, counts[rank]):
            one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
            average.update_parameters(ddp.module)
    return flat_state(average.state_dict()), flat_state(dict(ddp.module.named_buffers()))


@pytest.mark.parametrize(
    ("way", "counts", "as_dict"), all_or_each(product([PLAIN, ITERATE], [(2, 2, 2), (2, 3, 0)], [False, True]))
)
def test_buffers_of_an_average_follow(pool: Pool, way: str, counts: tuple[int, ...], as_dict: bool) -> None:
    results = pool.run(averaged, way, counts, as_dict, ranks=RANKS)
    for average, buffers in results:
        assert_same(average, results[0][0])
        for name, value in buffers.items():
            (copied,) = [each for path, each in average.items() if path.endswith(name.removeprefix("0."))]
            assert torch.equal(copied, value)


def two_modules(rank: int, way: str, counts: tuple[int, ...]) -> list[float]:
    def norm() -> DistributedDataParallel:
        return DistributedDataParallel(
            torch.nn.Sequential(torch.nn.BatchNorm1d(1, momentum=0.5), torch.nn.Linear(1, 1))
        )

    models = [norm(), norm(), norm()]
    with Join(models, divide_by_initial_world_size=False) as join:
        mine = [torch.tensor([[0.0], [2.0]]) + 100 * rank] * counts[rank]
        for step, x in enumerate(join.iterate(mine) if way == ITERATE else mine):
            for model in models[: 2 if step % 2 else 3]:  # the last one only at every other step
                model(x).sum().backward()
    return [model.module[0].running_mean.item() for model in models]


@pytest.mark.parametrize(("way", "counts"), all_or_each(product([PLAIN, ITERATE], [(2, 5, 0), (0, 3, 5), (3, 2, 5)])))
def test_buffers_of_all_modules_come_from_the_same_rank(pool: Pool, way: str, counts: tuple[int, ...]) -> None:
    expected = [0.0] * 3
    for step in range(5):
        rank = next(rank for rank in range(RANKS) if counts[rank] > step)
        for index in range(2 if step % 2 else 3):
            expected[index] = 0.5 * expected[index] + 0.5 * (1 + 100 * rank)
    for found in pool.run(two_modules, way, counts, ranks=RANKS):
        assert found == pytest.approx(expected)


class Cache(torch.nn.Module):
    """Its forward makes a buffer as long as the sequence, where that is longer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(3, 1)
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        if length > len(self.cache):
            self.cache = torch.arange(1.0, length + 1)
        return self.inner(x * self.cache[:length, None])


def sequence(rank: int, step: int, length: int) -> torch.Tensor:
    return torch.randn(2, length, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def growing(rank: int, way: str, counts: tuple[int, ...], lengths: tuple[tuple[int, ...], ...], evaluates: bool) -> Any:
    ddp = DistributedDataParallel(Cache())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for epoch in range(2):
        with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
            mine = [sequence(rank, step, lengths[rank][step]) for step in range(counts[rank])]
            for x in join.iterate(mine) if way == ITERATE else mine:
                optimizer.zero_grad()
                ddp(x).square().mean().backward()
                optimizer.step()
        if evaluates and epoch == 0:
            with torch.no_grad():
                ddp(torch.ones(1, 20, 3))
    return flat_state(dict(ddp.module.named_parameters())), ddp.module.cache.shape


def growing_reference(counts: tuple[int, ...], lengths: tuple[tuple[int, ...], ...]) -> dict[str, torch.Tensor]:
    model = Cache()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        for step in range(max(counts)):
            optimizer.zero_grad()
            ranks = [rank for rank in range(len(counts)) if counts[rank] > step]
            for rank in ranks:
                (model(sequence(rank, step, lengths[rank][step])).square().mean() / len(ranks)).backward()
            optimizer.step()
    return flat_state(dict(model.named_parameters()))


ALIKE = ((4, 6, 8, 8),) * RANKS


@pytest.mark.parametrize(
    ("way", "counts", "lengths", "evaluates"),
    [
        (PLAIN, (1, 4, 0), ALIKE, False),
        (PLAIN, (4, 2, 1), ALIKE, True),
        (PLAIN, (3, 3, 3), ALIKE, False),
        (ITERATE, (3, 3, 3), ALIKE, True),
        (ITERATE, (4, 3, 3), ((4, 6, 8, 8),) * RANKS, False),
        (PLAIN, (1, 2, 2), ((4,), (4, 6), (4, 8)), False),  # unlike, in the last step only
    ],
)
def test_buffers_that_grow(
    pool: Pool, way: str, counts: tuple[int, ...], lengths: tuple[tuple[int, ...], ...], evaluates: bool
) -> None:
    results = pool.run(growing, way, counts, lengths, evaluates, ranks=RANKS)
    for state, shape in results:
        assert_same(state, growing_reference(counts, lengths), TOLERANCE)
        assert shape == results[0][1]


def growing_at_the_end(rank: int, way: str) -> str:
    with pytest.raises(ProtocolError) as caught:
        growing(rank, way, (2, 2, 2), ((4, 6), (4, 8), (4, 4)), False)
    return str(caught.value)


@pytest.mark.parametrize("way", [PLAIN, ITERATE])
def test_buffers_that_grow_unlike_in_the_last_step(pool: Pool, way: str) -> None:
    for text in pool.run(growing_at_the_end, way, ranks=RANKS):
        assert re.search(r"the shape of buffer cache .* is \[6\] on rank 0, \[8\] on rank 1, \[4\] on rank 2", text), (
            text
        )


@pytest.mark.parametrize(
    ("way", "counts", "lengths", "told"),
    [
        (
            PLAIN,
            (3, 3, 3),
            ((4, 4, 4), (4, 6, 6), (4, 4, 4)),
            "changed their shape on 1 of 3 ranks with data (cache [6])",
        ),
        (PLAIN, (3, 3, 1), ((4, 4, 4), (4, 6, 6), (4,)), "changed their shape on 1 of 2"),
        (
            ITERATE,
            (1, 3, 3),
            ((4,), (4, 6, 6), (4, 6, 6)),
            "Cache changed their shape while another rank had no data (cache [6])",
        ),
    ],
)
def test_buffers_that_some_ranks_change_are_an_error_on_all(
    ending: Ending, way: str, counts: tuple[int, ...], lengths: tuple[tuple[int, ...], ...], told: str
) -> None:
    errors = ending.run(growing_alone, way, counts, lengths)
    assert any(told in error for error in errors), errors
    assert all("changed their shape" in error for error in errors), errors


def growing_alone(rank: int, way: str, counts: tuple[int, ...], lengths: tuple[tuple[int, ...], ...]) -> str:
    try:
        growing(rank, way, counts, lengths, False)
    except JoinError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# -- what users do themselves -----------------------------------------------------------------------------------------


COUNTED = ((1, 4, 0), (3, 3, 3))
STEPS = ["one", "SAM", "lazy", "closure", "GradNorm", "accumulation", "GAN"]


def iteration(kind: str, optimizer: Any, step: int, loss: Callable[[int], torch.Tensor]) -> None:
    """Run one iteration of a loop, of which a backward or a step of the optimizer is no measure."""
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
    for _ in range(1 - step % 2 if kind == "lazy" else 2 if kind == "SAM" else 1):

        def compute() -> None:
            optimizer.zero_grad()
            if kind == "GradNorm":
                torch.autograd.grad(loss(0), optimizer.param_groups[0]["params"][-1])
            for module in {"accumulation": (0, 0), "GAN": (0, 1)}.get(kind, (0,)):
                loss(module).backward()

        if kind == "closure":
            optimizer.step(compute)
        else:
            compute()
            optimizer.step()


def counting(rank: int, way: str, kind: str) -> Any:
    modules = [DistributedDataParallel(build("mlp")) for _ in range(1 + (kind == "GAN"))]
    optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)
    steps = torch.tensor(0)
    for epoch, counts in enumerate(COUNTED):
        with Join([*modules, optimizer], divide_by_initial_world_size=False) as join:
            for x, y in batches(join, way, rank, epoch, counts[rank]):
                iteration(kind, optimizer, int(steps), lambda number, x=x, y=y: loss_of(modules[number], x, y))
                steps += 1
        if way == ITERATE:
            assert join.report.steps == max(counts)
        else:
            with pytest.raises(JoinError, match="J442"):
                _ = join.report.steps
            dist.all_reduce(steps, dist.ReduceOp.MAX)
    return flat_state(*(module.module.state_dict() for module in modules))


@pytest.mark.parametrize(("kind", "way"), all_or_each(product(STEPS, [PLAIN, ITERATE])))
def test_a_counter_that_sets_the_learning_rate(pool: Pool, way: str, kind: str) -> None:
    modules = [build("mlp") for _ in range(1 + (kind == "GAN"))]
    optimizer = torch.optim.SGD([each for module in modules for each in module.parameters()], lr=0.1)
    steps = 0
    for epoch, counts in enumerate(COUNTED):
        for step in range(max(counts)):
            data = [batch(rank, epoch, step) for rank in range(RANKS) if counts[rank] > step]
            iteration(
                kind, optimizer, steps,
                lambda number, data=data: sum(loss_of(modules[number], x, y) for x, y in data) / len(data),  # type: ignore[arg-type,return-value]
            )  # fmt: skip
            steps += 1
    for state in pool.run(counting, way, kind, ranks=RANKS):
        assert_same(state, flat_state(*(module.state_dict() for module in modules)), TOLERANCE)


@torch.no_grad()
def normalise(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.div_(parameter.norm())


def by_hand(rank: int) -> dict[str, torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(build("mlp"))
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    with Join([ddp, optimizer], divide_by_initial_world_size=False) as join:
        for x, y in batches(join, ITERATE, rank, 0, (1, 4, 0)[rank]):
            one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
            normalise(ddp.module)
    return flat_state(ddp.module.state_dict())


def test_weights_that_are_changed_by_hand_under_zero(pool: Pool) -> None:
    model = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        data = [batch(rank, 0, step) for rank in range(RANKS) if (1, 4, 0)[rank] > step]
        one_step(optimizer, lambda data=data: sum(loss_of(model, x, y) for x, y in data) / len(data))  # type: ignore[return-value]
        normalise(model)
    for state in pool.run(by_hand, ranks=RANKS):
        assert_same(state, flat_state(model.state_dict()), TOLERANCE)


def steps_on_nothing(rank: int) -> bool:
    """One rank steps once more, without gradients, which changes nothing."""
    ddp = DistributedDataParallel(build("mlp"))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with Join([ddp, optimizer]) as join:
        for x, y in join.iterate([batch(rank, 0, step) for step in range(2)]):
            one_step(optimizer, lambda x=x, y=y: loss_of(ddp, x, y))
            optimizer.zero_grad()
            if rank == 0:
                optimizer.step()
    return join.report.even


def test_a_step_without_gradients_does_not_count(pool: Pool) -> None:
    assert pool.run(steps_on_nothing, ranks=2) == [True] * 2
