"""A trainer of a rank on uneven streams, and what it ends with."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.transformers.lm import ROWS, Stream, collated, llama, points, regression, sentences
from tests.training import whole

STEPS = {1: 10, 2: 6, 3: 5}
"""By windows; there are as many in all epochs or one less."""
TO_EVALUATE = ((3, 0),)


def trainer_of(
    rank: int,
    kind: str,
    folder: str,
    *,
    callbacks: Any = (),
    model: Any = None,
    train_dataset: Any = None,
    base: Any = None,
    **more: Any,
) -> Any:
    from transformers import Trainer, TrainingArguments

    from joinables.integrations.transformers import JoinTrainerMixin

    class Trained(JoinTrainerMixin, base or Trainer):  # pyright: ignore[reportGeneralTypeIssues]
        pass

    given = {"max_steps": STEPS[1], "save_strategy": "no", "learning_rate": 1e-2, "logging_steps": 1} | more
    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=ROWS,
        per_device_eval_batch_size=ROWS,
        optim="adamw_torch",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_nan_inf_filter=False,
        **given,
    )
    build, samples = (llama, sentences) if kind == "tokens" else (regression, points)
    return Trained(
        model=build() if model is None else model,
        args=arguments,
        data_collator=collated,
        train_dataset=Stream(samples, rank) if train_dataset is None else train_dataset,
        eval_dataset=Stream(samples, rank, TO_EVALUATE),
        callbacks=list(callbacks),
        compute_metrics=number_of_rows,
    )


def number_of_rows(prediction: Any) -> dict[str, float]:
    found = {"rows": prediction.predictions, "labels": prediction.label_ids}
    return {name: float(sum(map(len, each)) if isinstance(each, list) else len(each)) for name, each in found.items()}


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def parameters(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}
