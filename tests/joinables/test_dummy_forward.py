"""Models of Hugging Face, none of which can take an empty batch, with the defaults of ``Join.iterate``."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from join import Join
from joinables.modules import zero_of
from tests.harness import Pool, all_or_each, in_test_all
from tests.training import assert_same, flat_state, mesh_of, whole

COUNTS = 1, 3, 0
TEXT: dict[str, Any] = {"vocab_size": 17, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
HOWS = "DDP", "fully_shard"
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {**TEXT, "intermediate_size": 8}),
    "Qwen2": ("Qwen2ForCausalLM", {**TEXT, "intermediate_size": 8, "num_key_value_heads": 2}),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 17, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 8}),
    "Bert": ("BertForMaskedLM", {**TEXT, "intermediate_size": 8}),
    "ViT": (
        "ViTForImageClassification",
        {**TEXT, "intermediate_size": 8, "image_size": 4, "patch_size": 2, "num_labels": 3},
    ),
    "T5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 17, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
    ),
}


def build(family: str) -> Any:
    import transformers

    name, options = FAMILIES[family]
    dropout = {"ViT": "hidden_dropout_prob", "Bert": "hidden_dropout_prob", "T5": "dropout_rate", "GPT2": "resid_pdrop"}
    more = {dropout[family]: 0.0} if family in dropout else {}
    if family == "GPT2":
        more |= {"embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if family in ("Bert", "ViT"):
        more |= {"attention_probs_dropout_prob": 0.0}
    if family == "T5":
        more |= {"decoder_start_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**options, **more)
    torch.manual_seed(0)
    return getattr(transformers, name)(config)


def batch(family: str, rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + step)
    if family == "ViT":
        labels = torch.randint(3, (2,), generator=generator)
        return {"pixel_values": torch.randn(2, 3, 4, 4, generator=generator), "labels": labels}
    words = torch.randint(17, (2, 5 + step), generator=generator)  # of other lengths at each step
    return {"input_ids": words, "labels": words}


def train(rank: int, family: str, how: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # of Bert
    model = build(family)
    if how != "DDP":
        fully_shard(model, mesh=mesh_of())
    trained: Any = DistributedDataParallel(model, find_unused_parameters=family == "Bert") if how == "DDP" else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
    with Join([trained, optimizer], divide_by_initial_world_size=False) as join:
        for step, data in enumerate(join.iterate([batch(family, rank, step) for step in range(COUNTS[rank])])):
            output = trained(**data)
            loss = output.loss
            if step % 2:  # one's own, of what the model returns
                loss = output.logits.square().mean() + loss
            if join.shadowing:
                assert len(output.logits) == 0
                assert output.loss == 0
            optimizer.zero_grad()
            join.scale(loss).backward()
            optimizer.step()
            with torch.no_grad():
                assert trained(**data).loss == 0 or not join.shadowing
                if how != "DDP" or not join.shadowing:
                    continue
                assert len(trained(**batch(family, 5, step)).logits) == 2  # on samples of one's own
    return flat_state(whole(model.state_dict()))


@in_test_all
@pytest.mark.parametrize(("family", "how"), all_or_each(product(FAMILIES, HOWS), together=1))
def test_it_trains_exactly(pool: Pool, family: str, how: str) -> None:
    pytest.importorskip("transformers")
    model = build(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(max(COUNTS)):
        optimizer.zero_grad()
        ranks = [rank for rank in range(3) if step < COUNTS[rank]]
        for rank in ranks:
            output = model(**batch(family, rank, step))
            loss = output.loss + (output.logits.square().mean() if step % 2 else 0.0)
            (loss / len(ranks)).backward()
        optimizer.step()
    expected = flat_state(model.state_dict())
    for state in pool.run(train, family, how, timeout=100):
        assert_same(state, expected, 1e-5)


@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_zero_keeps_nothing_of_a_gradient(shape: tuple[int, ...]) -> None:
    source, like = torch.full(shape, torch.inf, requires_grad=True), torch.ones(2, dtype=torch.float64)
    zero = zero_of(source, like)
    assert zero.dtype == like.dtype and zero == 0
    (zero * torch.nan).backward()
    assert source.grad is not None and torch.equal(source.grad, torch.zeros(shape))
