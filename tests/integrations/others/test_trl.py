"""Trainers of TRL with the mixin: exact, with the logs of one process, or refused with the trainer's name."""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from itertools import islice
from typing import Any

import pytest
import torch

from join import JoinError
from tests.harness import Pool
from tests.integrations.ranks import imported, launched
from tests.integrations.transformers.training import logged, parameters
from tests.training import assert_same

pytest.importorskip("trl", reason="TRL is not installed: pip install trl")

COUNTS, ROWS, WORDS = (3, 1), 2, 28
TAKES_NO_STREAM = ("KTO", "GRPO", "RLOO") if version("trl").startswith("0.") else ()
"""Trainers that refuse a stream, or fail on it, in the installed version."""
LOGS = {
    "SFT": ["loss", "num_tokens", "mean_token_accuracy"],
    "DPO": ["loss", "num_tokens", "rewards/chosen", "rewards/accuracies", "logps/rejected"],
    "Reward": ["loss", "num_tokens", "min_reward", "mean_reward", "accuracy"],
    "KTO": ["loss", "num_tokens", "logps/chosen"],
}


def model_of(kind: str) -> Any:
    library = imported("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 1}
    config = library.LlamaConfig(vocab_size=WORDS + 4, **sizes, **ends)
    return getattr(library, "LlamaForSequenceClassification" if kind == "Reward" else "LlamaForCausalLM")(config)


def tokenizer() -> Any:
    library = imported("tokenizers")
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{number}": 4 + number for number in range(WORDS)}
    made = library.Tokenizer(library.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = library.pre_tokenizers.Whitespace()
    ends = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return imported("transformers").PreTrainedTokenizerFast(tokenizer_object=made, **ends)


def samples(kind: str, rank: int, step: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(100 * rank + step)

    def words(count: int) -> str:
        return " ".join(f"w{int(each)}" for each in torch.randint(WORDS, (count,), generator=generator))

    found: list[dict[str, Any]] = []
    for row in range(ROWS):
        prompt = {"prompt": words(3)}
        found.append(
            {
                "SFT": {"text": words(4 + (rank + step + row) % 3)},
                "KTO": prompt | {"completion": words(3 + row), "label": bool(row)},
            }.get(kind, prompt | {"chosen": words(3 + row), "rejected": words(4 - row)})
        )
    return found


def trainer_of(kind: str, rank: int, ranks: int, folder: str, accumulate: int) -> Any:
    library, data = imported("trl"), imported("datasets")
    from joinables.integrations.transformers import JoinTrainerMixin

    base = getattr(library, f"{kind}Trainer")
    steps = [[samples(kind, each, step) for each in range(2) if step < COUNTS[each]] for step in range(max(COUNTS))]
    if ranks > 1:
        base = type("Uneven", (JoinTrainerMixin, base), {})
        own = [row for step in range(COUNTS[rank]) for row in samples(kind, rank, step)]
    else:
        own = [row for step in steps for batch in step for row in batch]
    more = {
        "KTO": {"loss_type": "apo_zero_unpaired"},  # its losses need no rows of other ranks
        "GRPO": {"num_generations": 2, "max_completion_length": 4},
        "RLOO": {"num_generations": 2, "max_completion_length": 4, "beta": 0.0},
    }.get(kind, {})
    arguments = getattr(library, f"{kind}Config")(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=accumulate if ranks > 1 else 1,
        max_steps=-(-max(COUNTS) // accumulate),
        learning_rate=0.5,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **more,
    )
    reward = {"reward_funcs": lambda completions, **_: [float(len(each)) for each in completions]}
    made = base(
        model=model_of(kind),
        args=arguments,
        train_dataset=data.IterableDataset.from_generator(lambda: iter(own))
        if ranks > 1 and kind not in TAKES_NO_STREAM
        else data.Dataset.from_list(own),
        processing_class=tokenizer(),
        **({"ref_model": model_of(kind)} if kind in ("DPO", "KTO") else reward if kind in ("GRPO", "RLOO") else {}),
    )
    if ranks == 1:  # it has the batches of all ranks and of a whole window at once
        usual, groups, rows = made.get_train_dataloader, list[list[int]](), iter(range(len(own)))
        for first in range(0, len(steps), accumulate):
            groups.append(list(islice(rows, ROWS * sum(map(len, steps[first : first + accumulate])))))
        made.get_train_dataloader = lambda: made.accelerator.prepare(
            torch.utils.data.DataLoader(usual().dataset, batch_sampler=groups, collate_fn=usual().collate_fn)
        )
    return made


def train(rank: int, kind: str, ranks: int, accumulate: int) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
    with launched(CI="1"), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(kind, rank, ranks, folder, accumulate)
        trainer.train()
        return parameters(trainer), {name: logged(trainer, name) for name in LOGS[kind]}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", LOGS)
def test_it_trains_exactly(pool: Pool, kind: str, accumulate: int) -> None:
    """TRL logs a mean over the micro-batches of a window. So with windows, only the last one has the same logs."""
    if kind in TAKES_NO_STREAM:
        pytest.skip(f"{kind}Trainer takes no stream in TRL {version('trl')}")
    ((expected, numbers),) = pool.run(train, kind, 1, accumulate, ranks=1, timeout=100)
    for state, found in pool.run(train, kind, 2, accumulate, ranks=2, timeout=100):
        assert_same(state, expected, 1e-5)
        assert found["loss"] == pytest.approx(numbers["loss"], abs=1e-4)
        for name, values in numbers.items():
            assert found[name][1 - accumulate :] == pytest.approx(values[1 - accumulate :], abs=1e-4), name


def refused(rank: int, kind: str) -> str:
    with launched(CI="1"), tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(kind, rank, 2, folder, 1)
        with pytest.raises(JoinError) as caught:
            trainer.train()
        return str(caught.value)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_a_trainer_that_computes_with_gathered_rows_is_refused(pool: Pool, kind: str) -> None:
    for text in pool.run(refused, kind, ranks=2, timeout=100):
        assert "would count dummies too. Call self.accelerator.gather_for_metrics" in text and "[J521]" in text, kind
