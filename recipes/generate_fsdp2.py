"""Recipe: `generate()` of texts of unequal lengths with an FSDP2 model (`fully_shard`).

A text ends at its end token, so ranks make different numbers of forwards, and each forward of a sharded model gathers
parameters from all ranks. `generate(synced_gpus=True)` continues until all ranks are done with their batch. With
`join.iterate`, all ranks call `generate` equally often: a rank that has run out of prompts generates from its last
prompts again, or from prompts of another rank. Drop these texts: `join.shadowing` is true.
"""

from collections.abc import Iterable

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from joinables import Join
from joinables.testing import run_ranks

WORLD_SIZE, WORDS, PADDING, END = 3, 24, 0, 1
CONFIG = GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=END, pad_token_id=PADDING)
GENERATOR = torch.Generator().manual_seed(0)
PROMPTS = [[torch.randint(2, WORDS, (3, 5), generator=GENERATOR) for _ in range(n)] for n in (3, 1, 0)]  # by rank


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, eos_token_id=END, pad_token_id=PADDING, initializer_range=0.5, **shape)
    return LlamaForCausalLM(config).eval()


def texts_of(model: LlamaForCausalLM, prompts: Iterable[torch.Tensor], join: Join | None = None) -> list[list[int]]:
    texts = []
    for batch in prompts:
        found = model.generate(batch, generation_config=CONFIG, synced_gpus=join is not None).tolist()
        if join is None or not join.shadowing:
            texts += found
    return [[word for word in text if word != PADDING] for text in texts]


def generate(rank: int) -> None:
    model = make_model()
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    with Join([], process_group=None) as join:  # pass the group of the model's mesh; None is the default group
        texts = texts_of(model, join.iterate(PROMPTS[rank], dummy="last"), join)
    expected = texts_of(make_model(), PROMPTS[rank])
    different = sum(ours != theirs for ours, theirs in zip(texts, expected, strict=True))
    if rank == 0:
        print(f"{join.report}\n\nLengths of texts on rank 0: {', '.join(str(len(text)) for text in texts)}.")
        print(f"{different} of {len(texts)} differ from those of one process.")
    assert different == 0, "texts must be those of one process"


if __name__ == "__main__":
    run_ranks(generate, WORLD_SIZE)
