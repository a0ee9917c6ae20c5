"""Recipe: `generate()` of texts of unequal lengths with an FSDP2 model (`fully_shard`).

A text ends at its end token, so each rank makes other numbers of forwards, and a sharded model gathers its parameters
from all ranks in each of them. In a plain `Join` block each rank generates as it likes, and one that is done, or had no
prompt, runs the model for the others until they are done, too.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from joinables import Join, Replay

WORLD_SIZE, WORDS, PADDING, END = 3, 24, 0, 1
CONFIG = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=END, pad_token_id=PADDING)
A_CALL = {"input_ids": torch.ones(1, 1, dtype=torch.long), "use_cache": False}  # since a model takes no empty batch
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [[torch.randint(2, WORDS, (3, 5), generator=GENERATOR) for _ in range(n)] for n in (3, 1, 0)]  # by rank


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, eos_token_id=END, pad_token_id=PADDING, initializer_range=0.5, **shape)
    return LlamaForCausalLM(config).eval()


def texts_of(model: LlamaForCausalLM, prompts: list[torch.Tensor]) -> list[list[int]]:
    texts = []
    for batch in prompts:  # without synced_gpus=False, each token asks all ranks whether they are done
        texts += model.generate(batch, generation_config=CONFIG, synced_gpus=False).tolist()
    return [[word for word in text if word != PADDING] for text in texts]


def generate(rank: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    with Join([Replay(model, example=lambda: ((), A_CALL))]) as join:
        texts = texts_of(model, PROMPTS[rank])
    dist.barrier()
    dist.destroy_process_group()
    expected = texts_of(make_model(), PROMPTS[rank])
    different = sum(ours != theirs for ours, theirs in zip(texts, expected, strict=True))
    if rank == 0:
        print(f"{join.report}\n\nLengths of texts on rank 0: {', '.join(str(len(text)) for text in texts)}.")
        print(f"{different} of {len(texts)} differ from those of one process.")
    assert different == 0, "texts must be those of one process"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(generate, args=(f"{folder}/store",), nprocs=WORLD_SIZE)
