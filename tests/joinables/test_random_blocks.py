"""Random sequences of blocks: facts that outlast a step, a loop or a block, against one process.

A program is a sequence of blocks over one DDP module of three parts. Parts are frozen and thawed, windows of
accumulation last from one block to the next, loops are made before the first begins, and a block may be disabled. A
program for one rank also runs without a process group.
``SOAK=2000`` draws as many programs, other ones each time; ``make soak`` runs them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from join import Join
from tests.harness import Pool
from tests.training import assert_same, seed
from tests.training import draw as drawn

SOAK = int(os.environ.get("SOAK", "0"))
TOLERANCE = 1e-9
PARTS = 3
PLAIN, LOCKSTEP, DISABLED = "plain", "lockstep", "disabled"


@dataclass(frozen=True)
class Block:
    """One block; ``counts`` are the numbers of micro-batches by rank."""

    kind: str
    counts: tuple[int, ...]
    loops: int = 1  # over join.iterate; all of them are made before the first begins
    until: Literal["all", "first"] = "all"
    lookahead: int = 1


@dataclass(frozen=True)
class Program:
    """A training. ``freezes`` says when other parts are frozen: "", "forwards", of which a step has two, "steps", or
    "blocks"."""

    blocks: tuple[Block, ...]
    window: int = 1
    weighted: bool = False
    initial: bool = False
    to_none: bool = True
    freezes: str = ""
    stays_frozen: bool = False  # on entering a block, all parts are frozen
    momentum_encoder: bool = False
    optimizer: str = "listed"  # or "wrapped" or "unlisted"
    draws: bool = False  # each step draws a factor of its losses from generators that all ranks seeded alike

    @property
    def ranks(self) -> int:
        return len(self.blocks[0].counts)

    @property
    def forwards(self) -> int:
        return 1 + (self.freezes == "forwards")


class Net(nn.Module):
    """Parts in a chain; the encoder follows the first part, without gradients."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)])
        self.encoder = nn.Linear(4, 4).requires_grad_(False) if program.momentum_encoder else None
        self.double()

    def forward(self, x: torch.Tensor, *, takes_empty: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.parts[0](x))
        if self.encoder is not None:
            follow(self)
            if not len(x) and not takes_empty:
                raise ValueError("an empty batch")
            hidden = hidden + torch.tanh(self.encoder(x))
        return self.parts[2](torch.tanh(self.parts[1](hidden))).square()


@torch.no_grad()
def follow(net: Net) -> None:
    assert net.encoder is not None
    for mean, parameter in zip(net.encoder.parameters(), net.parts[0].parameters(), strict=True):
        mean.lerp_(parameter, 0.3)


class Wrapper:
    """An optimizer around another one, which has the state."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)


def batch(rank: int, block: int, step: int) -> torch.Tensor:
    seed = 1 + 100 * block + 10 * rank + step
    return torch.randn(weight(rank, block, step), 4, generator=torch.Generator().manual_seed(seed)).double()


def weight(rank: int, block: int, step: int) -> int:
    return 2 + (rank + block + 2 * step) % 4


def freeze(net: Net, program: Program, block: int, step: int, forward: int) -> None:
    """Freeze one part, or none."""
    numbers = {"": -1, "forwards": (block + step + forward) % 4, "steps": (block + step) % 4, "blocks": block % 4}
    number = numbers[program.freezes]
    for index, part in enumerate(net.parts):
        part.requires_grad_(index != number)


def places(program: Program) -> list[list[tuple[int, bool]]]:
    """For each block and step of it: the place in its window, and whether it ends it."""
    offset, found = 0, list[list[tuple[int, bool]]]()
    for number, block in enumerate(program.blocks):
        steps = steps_of(block)
        is_last = [(offset + step + 1) % program.window == 0 for step in range(steps)]
        if block.kind != PLAIN and is_last:
            is_last[-1] = True
        found.append([((offset + step) % program.window, end) for step, end in enumerate(is_last)])
        after = program.blocks[number + 1].kind if number + 1 < len(program.blocks) else ""
        offset = (offset + steps) % program.window if block.kind == PLAIN == after else 0
    return found


def steps_of(block: Block) -> int:
    return min(block.counts) if block.until == "first" else max(block.counts)


def steps_of_rank(join: Join, program: Program, number: int, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The steps of a block: numbered batches, and dummies of them in lockstep."""
    block = program.blocks[number]
    data = [batch(rank, number, step) for step in range(block.counts[rank])]
    if block.kind != LOCKSTEP:
        yield from enumerate(data)
        return
    weigh: Any = len if program.weighted else None
    ahead = block.lookahead
    # The loops are made before the first begins; each has a part of the steps.
    size = -(-steps_of(block) // block.loops)
    size = max(-(-size // program.window) * program.window, 1)
    parts = [data[start : start + size] for start in range(0, size * block.loops, size)]
    loops = [join.iterate(part, block.until, lookahead=ahead, weigh=weigh, window=program.window) for part in parts]
    step = 0
    for loop in loops:
        for x in loop:
            yield step, x
            step += 1


def train(rank: int, program: Program) -> dict[str, torch.Tensor]:
    net = Net(program)
    ddp: Any = net
    if dist.is_initialized():
        ddp = DistributedDataParallel(net, find_unused_parameters=bool(program.freezes))
    inner = torch.optim.SGD([p for part in net.parts for p in part.parameters()], lr=0.05, momentum=0.9)
    optimizer: Any = Wrapper(inner) if program.optimizer == "wrapped" else inner
    listed = [ddp] if program.optimizer == "unlisted" else [ddp, optimizer]
    if program.optimizer == "unlisted":
        inner.param_groups[0]["momentum"] = 0.0
    seed()
    for number, block in enumerate(program.blocks):
        places_of_block = places(program)[number]
        net.parts.requires_grad_(not program.stays_frozen)
        with Join(listed, enable=block.kind != DISABLED, divide_by_initial_world_size=program.initial) as join:
            for step, x in steps_of_rank(join, program, number, rank):
                place, ends = places_of_block[step]
                factor = drawn() if program.draws else 1.0
                if place == 0:
                    inner.zero_grad(set_to_none=program.to_none)
                scales = program.weighted or (block.kind == LOCKSTEP and program.window > 1)
                if block.kind != LOCKSTEP:
                    join.weight = weight_in(program, block, number, rank, step) if program.weighted else None
                # In plain blocks, each backward that is scaled weighs as much as the batch.
                losses = 1 if block.kind != LOCKSTEP and program.weighted else program.forwards
                for forward in range(program.forwards):
                    freeze(net, program, number, step, forward)
                    synchronises = ends and forward + 1 == program.forwards
                    with nullcontext() if synchronises or ddp is net else ddp.no_sync():
                        output = ddp(x, takes_empty=block.kind != LOCKSTEP or step % 2 == 0)
                        loss = factor * output.mean() / (losses if scales else losses * program.window)
                        (join.scale(loss) if scales else loss).backward()
                if ends:
                    optimizer.step()
        if places_of_block and not places_of_block[-1][1] and not stays_open(program, number):
            inner.zero_grad(set_to_none=program.to_none)
    net.parts.requires_grad_(True)
    return {name: value.detach() for name, value in net.state_dict().items()}


def weight_in(program: Program, block: Block, number: int, rank: int, step: int) -> int:
    """The weight of a batch; where blocks do nothing, ranks weigh the same."""
    return weight(0 if block.kind == DISABLED else rank, number, step)


def stays_open(program: Program, number: int) -> bool:
    following = program.blocks[number + 1 : number + 2]
    return program.blocks[number].kind == PLAIN and bool(following) and following[0].kind == PLAIN


def reference(program: Program) -> dict[str, torch.Tensor]:
    """One process, which knows what all ranks have."""
    net = Net(program)
    parameters = [p for part in net.parts for p in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.0 if program.optimizer == "unlisted" else 0.9)
    held: dict[int, tuple[float, list[torch.Tensor | None]]] = {}  # the open windows of ranks: weights and gradients
    seed()
    for number, block in enumerate(program.blocks):
        for step, (place, ends) in enumerate(places(program)[number]):
            factor = drawn() if program.draws else 1.0
            if place == 0:
                optimizer.zero_grad(set_to_none=program.to_none)
                held = {}
            for forward in range(program.forwards):
                freeze(net, program, number, step, forward)
                if net.encoder is not None:
                    follow(net)
                for rank in range(program.ranks):
                    if block.counts[rank] > step:
                        own = gradients(net, parameters, batch(rank, number, step))
                        amount = float(weight_in(program, block, number, rank, step)) if program.weighted else 1.0
                        amount /= program.forwards
                        before, sums = held.get(rank, (0.0, [None] * len(parameters)))
                        own = [plus(a, b, factor * amount) for a, b in zip(sums, own, strict=True)]
                        held[rank] = before + amount, own
            if ends:  # a rank that shadows does not know whether its loop would have called zero_grad
                held = {rank: own for rank, own in held.items() if block.counts[rank]}
                apply(program, block, parameters, held, places(program)[number], step)
                held = {}
                optimizer.step()
        if not stays_open(program, number):
            if places(program)[number] and not places(program)[number][-1][1]:
                optimizer.zero_grad(set_to_none=program.to_none)
            held = {}
    return {name: value.detach() for name, value in net.state_dict().items()}


def gradients(net: Net, parameters: list[nn.Parameter], x: torch.Tensor) -> list[torch.Tensor | None]:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    hidden = torch.tanh(net.parts[0](x))
    if net.encoder is not None:
        hidden = hidden + torch.tanh(net.encoder(x))
    loss = net.parts[2](torch.tanh(net.parts[1](hidden))).square().mean()
    own = dict(zip(trained, torch.autograd.grad(loss, trained), strict=True))
    return [own.get(parameter) for parameter in parameters]


def plus(total: torch.Tensor | None, gradient: torch.Tensor | None, amount: float) -> torch.Tensor | None:
    if gradient is None:
        return total
    return gradient * amount if total is None else total + gradient * amount


def apply(
    program: Program, block: Block, parameters: list[nn.Parameter],
    held: dict[int, tuple[float, list[torch.Tensor | None]]], of_block: list[tuple[int, bool]], step: int,
) -> None:  # fmt: skip
    """Give the parameters the mean of a window."""
    begins = next(start for start in range(step, -1, -1) if start == 0 or of_block[start - 1][1])
    if program.weighted:
        divisor = sum(weight for weight, _ in held.values())
    elif block.kind == LOCKSTEP and program.window > 1:
        divisor = program.ranks * (step + 1 - begins) if program.initial else sum(count for count, _ in held.values())
    else:
        over = program.ranks if program.initial or block.kind == DISABLED else len(held)
        divisor = float(over * program.window)
    for index, parameter in enumerate(parameters):
        sums = [own[index] for _, own in held.values() if own[index] is not None]
        if sums:
            total: torch.Tensor = sum(sums) / divisor  # type: ignore[assignment,operator]
            parameter.grad = total if parameter.grad is None else parameter.grad + total


@st.composite
def programs(draw: st.DrawFn) -> Program:
    ranks, window = draw(st.sampled_from([1, 2, 2, 3, 3])), draw(st.sampled_from([1, 2, 3, 3]))
    encoder = draw(st.booleans()) and draw(st.booleans())
    if encoder:
        window = 1
    blocks: list[Block] = []
    for _ in range(draw(st.integers(1, 3))):
        may_stay_open = window > 1 and (not blocks or blocks[-1].kind == PLAIN)  # a window, to the next block
        kind = draw(st.sampled_from([*[PLAIN] * (6 if may_stay_open else 2), LOCKSTEP, LOCKSTEP, DISABLED]))
        counts = draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks))
        if kind == DISABLED:
            counts = [counts[0]] * ranks
        if kind == PLAIN and window > 1:  # all end in the same place of a window, or have nothing
            counts = [max(counts) if draw(st.booleans()) else 0 for _ in counts]
        loops, ahead = draw(st.integers(1, 2)), draw(st.integers(0 if window == 1 else 1, 2))
        looping = kind == LOCKSTEP
        blocks.append(Block(kind, tuple(counts), loops if looping else 1, lookahead=ahead if looping else 1))
    freezes = draw(st.sampled_from(["", "forwards", "steps", "blocks"]))
    # DDP alone raises if zero_grad has dropped a window in which it found a parameter used.
    assume(not freezes or DISABLED not in [block.kind for block in blocks[1:]])
    # A rank that has no data in the next block drops its window, and gradients of parts that only it trained are 0.
    for block, after in pairwise(blocks):
        drops = any(count and not later for count, later in zip(block.counts, after.counts, strict=True))
        assume(not freezes or not (drops and steps_of(block) % window))
    return Program(
        tuple(blocks),
        window,
        weighted=draw(st.booleans()),
        initial=draw(st.booleans()),
        to_none=draw(st.booleans()),
        freezes=freezes,
        stays_frozen=draw(st.booleans()),
        momentum_encoder=encoder,
        optimizer=draw(st.sampled_from(["listed", "wrapped", "unlisted"])),
        draws=draw(st.booleans()),
    )


FOUND = {
    "a kept gradient under a window that outlasts its block": Program(
        (Block(PLAIN, (0, 3)), Block(PLAIN, (0, 1))), window=2, initial=True, to_none=False
    ),
    "gradients of zeros on the rank with a window that is dropped between two blocks": Program(
        (Block(PLAIN, (0, 4, 0)), Block(LOCKSTEP, (0, 1, 0))), window=3, to_none=False, freezes="steps"
    ),
    "a part that is frozen within a window, in a block that does nothing": Program(
        (Block(DISABLED, (2, 2)),), window=2, weighted=True, to_none=False, freezes="steps"
    ),
}


def check(pool: Pool, program: Program) -> None:
    expected = reference(program)
    alone = [train(0, program)] if program.ranks == 1 else []
    for found in [*pool.run(train, program, ranks=program.ranks, timeout=60.0), *alone]:
        assert_same(found, expected, TOLERANCE)


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(pool: Pool, name: str) -> None:
    check(pool, FOUND[name])


@pytest.mark.timeout(600 + 5 * SOAK)
@settings(
    max_examples=SOAK or 8,
    derandomize=not SOAK,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
@given(program=programs())
def test_equals_one_process(pool: Pool, program: Program) -> None:
    check(pool, program)
