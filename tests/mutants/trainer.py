"""Mutants of ``joinables.trainer``."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOOP = "tests/joinables/trainer/test_loop.py::"
TRAINER = "tests/joinables/trainer/test_trainer.py::"
CHECKPOINT = "tests/joinables/trainer/test_checkpoint.py::"
FREEZING = "tests/joinables/trainer/test_freezing.py::"
LIFETIMES = "tests/joinables/trainer/test_lifetimes.py::"

MUTANTS = [
    # -- data ----------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/trainer/data.py",
        "manual_seed(self.seed + self.epoch)",
        "manual_seed(self.seed)",
        "tests/joinables/trainer/test_data.py::test_shuffled_order_changes_with_the_epoch",
    ),
    Mutant(
        "joinables/trainer/data.py",
        "yield from order[first : first + block]",
        "yield from order[first : first + block] if first + block <= len(self.dataset) else ()",
        "tests/joinables/trainer/test_data.py::test_ranks_have_the_batches_of_one_process",
    ),
    Mutant(
        "joinables/trainer/data.py",
        "            equal = full == last",
        "            equal = True",
        LOOP + "test_a_last_batch_beside_a_full_one",
    ),
    Mutant(
        "joinables/trainer/run.py",
        'first["used"] in (None, sampler.used(first["batches"]))',
        "True",
        LIFETIMES + "test_a_fit_goes_on_with_another_batch_size",
    ),
    # -- steps ---------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/trainer/run.py",
        "sync = is_last or (index + 1) % k == 0",
        "sync = (index + 1) % k == 0",
        LOOP + "test_equals_a_loop_by_hand",
    ),
    Mutant(
        "joinables/trainer/run.py",
        'self.call("on_before_optimizer_step", optimizer)',
        "pass",
        LOOP + "test_equals_a_loop_by_hand",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "for optimizer in self.optimizers:  # a rank",
        "for optimizer in optimizers:  # a rank",
        LOOP + "test_equals_one_process[sharded, clipping]",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "            if stepped.interval == interval:",
        "            if True:",
        LOOP + "test_equals_a_loop_by_hand",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "self.schedulers), self.trainer]",
        "self.schedulers)]",
        LOOP + "test_equals_one_process[a rank without data]",
    ),
    Mutant(
        "joinables/trainer/run.py",
        'meet("begins an epoch", not self.trainer.should_stop)',
        'meet("begins an epoch") and self.trainer.should_stop',
        LOOP + "test_stopping_on_one_rank",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "range(max(map(len, parts)))",
        "range(min(map(len, parts)))",
        LOOP + "test_evaluation_with_a_rank_without_data",
    ),
    # -- the strategy --------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/trainer/strategy.py",
        "            self._window = 0.0\n",
        "            pass\n",
        LOOP + "test_equals_a_loop_by_hand",
    ),
    Mutant(
        "joinables/trainer/strategy.py",
        "p.requires_grad or id(p) in kept",
        "p.requires_grad",
        FREEZING + "test_a_part_stays_frozen_after_the_step",
    ),
    Mutant(
        "joinables/trainer/strategy.py",
        "[self.ddp, *listed, self]",
        "[self.ddp, *listed]",
        FREEZING + "test_a_change_within_an_epoch",
    ),
    Mutant(
        "joinables/trainer/strategy.py",
        " and not reducer.has_finished(self.ddp):",
        " and False:",
        FREEZING + "test_parameters_that_the_loss_does_not_reach",
    ),
    Mutant(
        "joinables/trainer/strategy.py",
        "    zero.register_load_state_dict_post_hook(share_groups)\n",
        "",
        LOOP + "test_schedulers_of_sharded_optimizers",
    ),
    # -- counters, metrics and random numbers --------------------------------------------------------------------------
    Mutant(
        "joinables/trainer/run.py",
        "self.samples if samples is None else samples",
        "1 if samples is None else samples",
        LOOP + "test_equals_one_process[uneven]",
    ),
    Mutant(
        "joinables/trainer/metrics.py",
        "        metric.weight += weight\n",
        "        metric.weight = weight\n",
        "tests/joinables/trainer/test_metrics.py::test_the_same_over_any_number_of_ranks",
    ),
    Mutant(
        "joinables/trainer/data.py",
        '            rng.restore(resumed["random_before_read"])\n',
        "            pass\n",
        LOOP + "test_resume_in_the_middle_of_an_epoch",
    ),
    Mutant(
        "joinables/trainer/data.py",
        '            self._metrics.merge(resumed["metrics"])\n',
        "",
        LOOP + "test_a_fit_without_a_step_keeps_the_place_in_the_epoch",
    ),
    Mutant(
        "joinables/trainer/rng.py",
        "seed % 2**32",
        "seed % 2",
        "tests/joinables/trainer/test_rng.py::test_numpy_begins_with_the_whole_seed",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "seed_all(trainer.seed + self.collective.rank)",
        "seed_all(trainer.seed)",
        "tests/joinables/trainer/test_rng.py::test_ranks_draw_different_numbers",
    ),
    # -- checkpoints and callbacks -------------------------------------------------------------------------------------
    Mutant(
        "joinables/trainer/run.py",
        "                stepped.scheduler.load_state_dict(saved)\n",
        "                pass\n",
        LIFETIMES + "test_a_scheduler_goes_on_in_the_next_fit",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "                consolidate(to=writer)",
        "                consolidate(to=0)",
        LOOP + "test_shards_go_to_the_rank_that_writes",
    ),
    Mutant(
        "joinables/trainer/callbacks.py",
        'sign = 1 if self._mode == "min" else -1',
        "sign = 1",
        CHECKPOINT + "test_the_best_are_kept",
    ),
    Mutant(
        "joinables/trainer/trainer.py",
        "    found.sort(key=lambda callback: callback.is_last)\n",
        "",
        LIFETIMES + "test_callbacks_that_are_added_between_fits",
    ),
    Mutant(
        "joinables/trainer/trainer.py",
        "                self.epochs, self.global_step = before\n",
        "",
        LIFETIMES + "test_a_fit_that_fails_counts_nothing",
    ),
    Mutant(
        "joinables/trainer/own.py",
        "several_backwards or XLACollective().devices_of_process() > 1",
        "several_backwards",
        "tests/joinables/trainer/test_own_strategies.py::test_what_is_refused",
    ),
    Mutant(
        "joinables/trainer/trainer.py",
        '        self.strategy.check(several_backwards=stage == "fit" and not module.automatic_optimization)\n',
        "",
        "tests/joinables/trainer/test_own_strategies.py::test_what_is_refused",
    ),
    # -- launching -----------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/trainer/launch.py",
        "place_of(found).world_size == 1 < world_size",
        "False",
        TRAINER + "test_the_trainer_starts_what_a_launcher_of_one_process_has_not",
    ),
    Mutant(
        "joinables/processes.py",
        "OTHERS if is_others else OWN",
        "OWN",
        "tests/joinables/trainer/test_launch.py::test_cause_before_its_consequences",
    ),
    Mutant(
        "joinables/processes.py",
        "    _leave_report(folder, rank, report)\n",
        "",
        "tests/joinables/trainer/test_launch.py::test_result_of_rank_0",
    ),
    Mutant(
        "joinables/trainer/files.py",
        "path for path in paths if not is_taken(path)",
        "path for path in paths",
        "tests/joinables/trainer/test_rescue.py::test_a_second_failure_leaves_the_file_of_the_first",
    ),
    Mutant(
        "joinables/processes.py",
        "ABORTED if code == -signal.SIGABRT else OWN",
        "OWN",
        "tests/joinables/trainer/test_launch.py::test_cause_before_its_consequences[abort]",
    ),
    Mutant(
        "joinables/trainer/run.py",
        'trainer.strategy.meet("has kept the trained weights")',
        "pass",
        "tests/joinables/trainer/test_rescue.py::"
        "test_a_result_takes_longer_to_write_than_the_launch_waits_after_a_failure",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "            self._keep_trained(trainer.epochs + 1)",
        "            pass",
        "tests/joinables/trainer/test_rescue.py::test_a_failure_after_the_last_step",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "            self._keep_trained(trainer.epochs)\n",
        "            pass\n",
        "tests/joinables/trainer/test_rescue.py::test_weights_that_the_last_epoch_end_swaps_in",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "trainer.epochs + 1) and not trainer.should_stop",
        "trainer.epochs + 1)",
        "tests/joinables/trainer/test_rescue.py::test_a_failure_after_the_last_step",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "            run_hooks(optimizer)\n",
        "",
        "tests/joinables/trainer/test_hooks.py::test_an_optimizer_whose_base_is_not_constructed",
    ),
    Mutant(
        "joinables/trainer/module.py",
        " and id(part) not in received",
        "",
        "tests/joinables/trainer/test_faults.py::test_state_of_hooks_that_ranks_without_data_do_not_call",
    ),
    Mutant(
        "joinables/trainer/run.py",
        " or is_weighted or may_end",
        " or is_weighted",
        "tests/joinables/trainer/test_faults.py::test_a_hook_ends_an_epoch_of_one_rank",
    ),
    Mutant(
        "joinables/trainer/run.py",
        'may_end = not trainer.strategy.meet("reads its first batch", not may_end)',
        'trainer.strategy.meet("reads its first batch")',
        "tests/joinables/trainer/test_faults.py::test_a_callback_of_one_rank_ends_its_epoch",
    ),
    Mutant(
        "joinables/trainer/run.py",
        "is_first and not is_even",
        "is_first and are_known and not plan.even",
        "tests/joinables/trainer/test_faults.py::test_state_of_hooks_that_ranks_without_data_do_not_call",
    ),
    Mutant(
        "joinables/trainer/run.py",
        'if self.task.stage != "fit":  # otherwise they are in the row',
        "if True:  # otherwise they are in the row",
        "tests/joinables/trainer/test_loggers.py::test_a_row_for_each_epoch_and_evaluation",
    ),
    Mutant(
        "join/protocol/channel.py",
        "            self.headers.leader = 0\n        self.guard",
        "            pass\n        self.guard",
        LOOP + "test_buffers_are_those_of_the_lowest_rank_with_data",
    ),
]
