"""Recipe: `torch.distributed.pipelining`: two stages on two replicas, which have different numbers of batches.

The ranks of a replica loop over the same batches: the first stage needs the inputs, the last stage the targets. The
messages between stages have a fixed shape, so dummies are last batches. Divide the loss by the `n` pipeline
micro-batches yourself, and pass `scale_grads=False`: otherwise each `schedule.step` divides all of `grad` by `n`, with
the gradients of earlier steps of a window. Do not pass the number of replicas as `divided_over`: the default is right.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.functional import mse_loss

from joinables import Join
from joinables.testing import run_ranks

BATCHES = (5, 0)  # of each replica
WINDOW = 2  # batches of each replica for one optimizer step
MICRO_BATCHES = (4, 2)  # pipeline micro-batches in each batch, by replica
SAMPLES = torch.randn(2, 5, 8, 4, generator=torch.Generator().manual_seed(0))  # [replica, batch, sample, feature]


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def train(rank: int) -> dict[str, torch.Tensor]:
    """Train one epoch and return the parameters of this rank's stage."""
    replica, number = divmod(rank, 2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    model = make_model()[:2] if number == 0 else make_model()[2:]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with Join([], process_group=None, divide_by_initial_world_size=False) as join:

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return join.scale(mse_loss(output, target)) / MICRO_BATCHES[replica]

        stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("stage"))
        schedule = ScheduleGPipe(stage, MICRO_BATCHES[replica], loss_fn=loss_fn, scale_grads=False)
        for x in join.iterate(SAMPLES[replica, : BATCHES[replica]], dummy="last", window=WINDOW):
            schedule.step(x) if number == 0 else schedule.step(target=x.sum(1, keepdim=True))
            if join.ends_window:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad, group=mesh.get_group("replica"))
                    parameter.grad /= 2
                optimizer.step()
                optimizer.zero_grad()
    return model.state_dict()


def train_in_one_process() -> dict[str, torch.Tensor]:
    model, counts = make_model(), list(enumerate(BATCHES))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for at in range(0, max(BATCHES), WINDOW):
        x = torch.cat([SAMPLES[replica, at : min(at + WINDOW, count)].flatten(0, 1) for replica, count in counts])
        optimizer.zero_grad()
        mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    return model.state_dict()


def compare(rank: int) -> None:
    expected = train_in_one_process()
    difference = max((value - expected[name]).abs().max().item() for name, value in train(rank).items())
    if rank == 0:
        print(f"Parameters differ from those of one process by {difference:.0e}.")
    assert difference < 1e-6, "a pipeline on uneven replicas must end where one process ends"


if __name__ == "__main__":
    run_ranks(compare, 4)
