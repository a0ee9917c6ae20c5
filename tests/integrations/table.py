"""Table of patterns in training frameworks: how each ends, and the test that shows it.

``docs/patterns.py`` writes it into the page of frameworks. A cell is one of

- ``"exact"`` and the name of a test: the result is that of a single process;
- the code of an error and the name of a test: all ranks raise that error;
- ``"yours"`` and a section of a page, which says what to write;
- ``""``: the framework has no such pattern, or no test tries it.
"""

from __future__ import annotations

from dataclasses import dataclass

FIT, EVALUATION, DUMMIES = "test_fit::test_as_one_process", "test_evaluation::test_as_one_process", "test_dummies::"
FABRIC, WINDOWS = "test_fabric::test_as_one_process", "test_fabric::test_windows_and_means"
BLOCK, DATA = "test_block::test_it_trains_exactly", "test_data::"
TRAINER, TUNER = "test_trainer::test_it_trains_exactly", "test_subclass::test_it_trains_exactly"
TRL = "exact test_trl::test_it_trains_exactly"
FOLDERS = {"lightning": "lightning", "fabric": "lightning", "trl": "others"}
"""Folder of a column's tests, if its name is not that of the column."""


@dataclass(frozen=True)
class Row:
    """A pattern, and how it ends in each framework."""

    title: str
    lightning: str = ""
    fabric: str = ""
    accelerate: str = ""
    transformers: str = ""
    trl: str = ""


COLUMNS = {
    "lightning": "Lightning",
    "fabric": "Fabric",
    "accelerate": "Accelerate",
    "transformers": "Transformers",
    "trl": "TRL",
}
ROWS = [
    Row(
        "streams of different lengths, a rank without data",
        f"exact {FIT}",
        f"exact {FABRIC}",
        f"exact {BLOCK}",
        f"exact {TRAINER}",
        TRL,
    ),
    Row(
        "a map-style data set, no sample repeated",
        "exact test_refusals::test_an_injected_sampler_repeats_nothing",
        "yours lightning.md#fabric",
        f"exact {DATA}test_no_sample_of_a_prepared_loader_is_repeated",
        f"exact {DATA}test_a_map_style_data_set",
    ),
    Row(
        "batches weighed by samples or tokens",
        f"exact {FIT}",
        f"exact {FABRIC}",
        f"exact {BLOCK}",
        f"exact {TRAINER}",
        TRL,
    ),
    Row(
        "gradient accumulation, an incomplete last window",
        f"exact {FIT}",
        f"exact {WINDOWS}",
        f"exact {BLOCK}",
        f"exact {TRAINER}",
        TRL,
    ),
    Row(
        "micro-batches that the loop body cuts from a batch",
        accelerate="J600 test_micro_batches::test_what_would_be_wrong_is_refused_on_all_ranks",
    ),
    Row(
        "the batches of a window collected, then trained on",
        fabric="J601 test_scaling::test_losses_that_are_scaled_in_another_step_are_refused",
        accelerate="J601 test_micro_batches::test_what_would_be_wrong_is_refused_on_all_ranks",
    ),
    Row(
        "losses divided by the samples of all ranks",
        accelerate="exact test_micro_batches::test_the_line_to_write_is_exact",
        transformers=f"exact {TUNER}",
    ),
    Row(
        "models that ignore `num_items_in_batch`",
        transformers="exact test_heads::test_it_trains_exactly",
        trl=TRL,
    ),
    Row("several optimizers, as in a GAN", "exact test_manual::test_as_one_process"),
    Row("windows of the module itself, `toggle_model`", "exact test_manual::test_windows_of_the_module_itself"),
    Row("clipping", f"exact {FIT}", f"exact {WINDOWS}", f"exact {BLOCK}", f"exact {TRAINER}"),
    Row("schedulers", f"exact {FIT}", f"exact {FABRIC}", f"exact {BLOCK}", f"exact {TRAINER}"),
    Row(
        "the number of steps, before the first one",
        "exact test_steps::test_it_is_known_on_all_ranks",
        transformers=f"exact {DATA}test_streams_that_have_a_length",
    ),
    Row(
        "BatchNorm",
        f"exact {FIT}",
        transformers="exact test_subclass::test_dummies_do_not_count_in_buffers",
    ),
    Row(
        "SyncBatchNorm",
        f"J104 {DUMMIES}test_synchronised_norms_are_refused",
        accelerate=f"exact {DUMMIES}test_dummies_are_empty_where_ranks_compute_together",
    ),
    Row("FSDP2", accelerate=f"exact {BLOCK}", transformers="exact test_trainer::test_sharded_models"),
    Row("FSDP1", accelerate=f"J120 {DATA}test_what_is_refused"),
    Row(
        "a model that is in DDP already",
        "J291 test_refusals::test_a_module_that_is_wrapped_already",
        "J291 test_fabric::test_a_module_that_is_wrapped_already",
        f"J291 {DATA}test_what_is_refused",
    ),
    Row(
        "a guard against NaN in the loss",
        f"exact {DUMMIES}test_a_guard_against_nan_meets_none",
        accelerate=f"exact {DUMMIES}test_a_guard_against_nan_meets_none",
        transformers=f"exact {DUMMIES}test_a_trainer_as_it_is_and_one_that_looks_at_its_losses",
    ),
    Row(
        "one rank skips a backward",
        f"J093 {DUMMIES}test_a_backward_that_one_rank_leaves_out",
    ),
    Row(
        "logged means over ranks",
        "exact test_evaluation::test_what_training_logs",
        "yours lightning.md#means-and-evaluation-in-fabric",
        f"exact {DUMMIES}test_what_dummies_give_is_left_out",
        "exact test_heads::test_it_trains_exactly",
        TRL,
    ),
    Row("values that are logged only for some batches", "exact test_keys::test_in_a_step_and_its_epoch"),
    Row("metrics of torchmetrics, and wrappers", "exact test_evaluation::test_a_wrapper_of_a_metric"),
    Row(
        "rows of all ranks in a step, without dummies",
        accelerate=f"exact {DATA}test_gathering_in_step",
        transformers=f"exact {TUNER}",
        trl=TRL,
    ),
    Row(
        "rows of all ranks in a step, by `all_gather` or `gather`",
        f"J522 {DUMMIES}test_what_a_step_gathers",
        "yours lightning.md#fabric",
        f"J521 {DUMMIES}test_what_dummies_give_is_left_out",
        f"J521 {DUMMIES}test_a_trainer_as_it_is_and_one_that_looks_at_its_losses",
        "J521 test_trl::test_a_trainer_that_computes_with_gathered_rows_is_refused",
    ),
    Row(
        "evaluation in the training loop",
        f"exact {EVALUATION}",
        f"exact {WINDOWS}",
        f"exact {DATA}test_an_evaluation_in_the_loop_counts_each_sample_once",
        "exact test_trainer::test_evaluation_on_uneven_streams",
    ),
    Row(
        "sums of one's own over batches, reduced in the loop",
        "yours lightning.md#logs",
        accelerate=f"J725 {DUMMIES}test_what_dummies_give_is_left_out",
        transformers=f"J725 {DUMMIES}test_a_trainer_as_it_is_and_one_that_looks_at_its_losses",
    ),
    Row(
        "a sum of one's own over batches, as a row for `gather_for_metrics`",
        accelerate=f"J765 {DUMMIES}test_what_dummies_give_is_left_out",
    ),
    Row(
        "rows of the training batch, gathered after such an evaluation",
        accelerate=f"J726 {DATA}test_an_evaluation_in_the_loop_counts_each_sample_once",
    ),
    Row(
        "validation in the middle of a window",
        "J131 test_fit::test_a_validation_in_the_middle_of_a_window",
    ),
    Row(
        "early stopping",
        "exact test_evaluation::test_early_stopping_with_a_progress_bar",
        transformers="exact test_trainer::test_early_stopping_and_the_best_model",
    ),
    Row("the best model at the end", transformers="exact test_trainer::test_early_stopping_and_the_best_model"),
    Row("`compute_metrics` on uneven streams", transformers="exact test_trainer::test_evaluation_on_uneven_streams"),
    Row("`LocalSGD` of Accelerate", accelerate=f"J116 {DATA}test_local_sgd_is_refused"),
    Row(
        "resuming in the middle of an epoch",
        "exact test_resume::test_torchdata_s_loader_goes_on_from_each_step",
        accelerate=f"exact {DUMMIES}test_a_checkpoint_has_the_place_of_the_batch_in_hand",
        transformers="exact test_trainer::test_resuming_in_the_middle_of_an_epoch",
    ),
    Row(
        "a state of a loader that cannot be saved",
        fabric="J075 test_fabric::test_a_loader_whose_state_is_hidden",
        accelerate=f"J520 {DUMMIES}test_places_that_accelerate_cannot_save",
    ),
    Row(
        "one process",
        "",
        "exact test_fabric::test_on_one_device",
        f"exact {DATA}test_one_process",
        f"exact {DATA}test_one_process",
    ),
]
