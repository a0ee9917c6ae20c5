"""Mutants of ``joinables``, but for its trainer and integrations."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    # -- reductions ----------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/ddp/reduction.py",
        "            channel.leave_loop()\n        if self._ddp.find_unused",
        "            pass\n        if self._ddp.find_unused",
        "tests/joinables/ddp/test_buffers.py::test_a_loop_that_was_left_ends_before_the_next_forward",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "saves_header = not contributions.last_result.may_remain",
        "saves_header = True",
        "tests/joinables/ddp/test_headers.py::test_gradients_that_are_kept_cost_a_header_for_the_backward",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "depends_on_others and result.may_remain",
        "False",
        "tests/joinables/ddp/test_weight.py::test_gradients_that_are_kept",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "weighted != contributions.was_weighted:\n                contributions",
        "False:\n                contributions",
        "tests/joinables/ddp/test_weight.py::test_weight_on_one_of_two_ranks_with_data",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "if misses_result and not channel.has_run_out:",
        "if False:",
        "tests/join/failure/test_training.py::test_in_a_loop_in_lockstep_it_is_an_error_for_all",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "None if gradient is None else gradient.clone()",
        "gradient",
        "tests/joinables/ddp/test_kept_gradients.py::test_a_skipped_backward_leaves_gradients_as_they_were",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "else float(window.unreduced))",
        "else 0.0)",
        "tests/joinables/ddp/test_exact.py::test_equals_one_process[zero_grad keeps tensors, accumulation, batch norm]",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "self._rebuild.holds_followers = self._rebuild.is_due",
        "pass",
        "tests/joinables/test_state.py::test_torch_joinables_of_others",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "        if channel.step.shadowing:  # SyncBatchNorm's",
        "        if False:  # SyncBatchNorm's",
        "tests/joinables/ddp/test_buffers.py::test_dummies_leave_no_trace_in_statistics_that_each_rank_keeps",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "self._on_backward_of_dummy if self._channel.step.shadowing else self._on_backward",
        "self._on_backward",
        "tests/join/failure/test_training.py::test_a_backward_after_the_loop_in_which_its_forward_ran_on_a_dummy",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "autograd.gradient_writes(self._parameters) != self._writes_before",
        "False",
        "tests/join/failure/test_training.py::test_a_backward_inside_the_forward",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "0.0 if weight == 0 else 1.0",
        "1.0",
        "tests/joinables/ddp/test_weight.py::test_weight_0_of_a_gradient_that_is_no_number",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "window.unreduced and (window.weight is None) != (weight is None)",
        "False",
        "tests/joinables/ddp/test_weight.py::test_weight_that_is_set_or_unset_in_a_window",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "window.weight = (window.weight or 0.0) + weight",
        "window.weight = weight",
        "tests/joinables/ddp/test_weight.py::test_gradients_that_are_kept",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "            self.drop_if_zeroed()\n        if in_loop",
        "            pass\n        if in_loop",
        "tests/joinables/ddp/test_kept_gradients.py::test_a_window_that_was_zeroed_weighs_nothing",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "if window is not None and not (was_zeroed or self.last_result.has_no_gradient):",
        "if window is not None and not self.last_result.has_no_gradient:",
        "tests/joinables/ddp/test_window_over_blocks.py::test_equals_one_process",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "self.memory.open_window, self.memory.writes = self.window, ",
        "_, self.memory.writes = self.window, ",
        "tests/joinables/ddp/test_window_over_blocks.py::test_equals_one_process",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "float(not step.shadowing or self.over_all_ranks or self._channel.scaling.in_use is True)",
        "1.0",
        "tests/joinables/ddp/test_kept_gradients.py::test_a_result_that_is_kept_in_a_loop_counts_once",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "(window.weight or 0.0) / self._channel.scaling.unit",
        "window.weight or 0.0",
        "tests/joinables/ddp/test_weight.py::test_gradients_that_are_kept",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "self._world_size / self._channel.headers.flags(self._burst)[CONTRIBUTES]",
        "1.0",
        "tests/joinables/ddp/test_kept_gradients.py::test_a_result_that_is_added_to_makes_nothing_wait",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "using and using != (announced := self._channel.headers.announced(self._burst))",
        "not (announced := 1)",
        "tests/joinables/ddp/test_weight.py::test_weight_on_one_of_two_ranks_with_data",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "not (self.over_all_ranks or self._channel.scaling.in_use)",
        "not self.over_all_ranks",
        "tests/join/test_scaling.py::test_dummies_add_nothing_whatever_arrives",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "reduction.weighted or (reduction.with_buffers and reduction.is_scaled):",
        "reduction.weighted:",
        "tests/joinables/ddp/test_backwards.py::test_equals_one_process",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "self._channel.scaling.unit, self._has_comm_hook",
        "self._channel.scaling.unit, False",
        "tests/joinables/ddp/test_comm_hooks.py::test_weights_under_a_comm_hook_equal_padded_ddp",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "contributions.window = Window() if has_result else window",
        "contributions.window = Window()",
        "tests/joinables/ddp/test_kept_gradients.py::test_gradients_whose_reduction_all_ranks_skip_are_not_forgotten",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "            if self._adds_result_later():\n                self.last_result.add(1.0)",
        "            pass",
        "tests/joinables/ddp/test_kept_gradients.py::test_a_result_that_is_added_to_makes_nothing_wait",
    ),
    Mutant(
        "joinables/ddp/reduction.py",
        "len(self._channel.roster.backwards)",
        "1",
        "tests/join/test_units.py::test_the_unit_of_several_modules",
    ),
    # -- buffers -------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/ddp/buffers.py",
        "channel.headers.find_leader() if self._is_changed_by_forward else self._last_header.leader",
        "self._last_header.leader",
        "tests/joinables/ddp/test_buffers.py::test_a_buffer_that_grows_before_a_loss_gate",
    ),
    Mutant(
        "joinables/ddp/buffers.py",
        "        if leader == self._last_header.leader:\n            return",
        "        return",
        "tests/joinables/ddp/test_buffers.py::test_statistics_of_a_last_step_without_a_reduction",
    ),
    Mutant(
        "joinables/ddp/buffers.py",
        "self._all_changed = self._all_had_data and (",
        "self._all_changed = (",
        "tests/joinables/ddp/test_buffers.py::test_a_buffer_that_grows_without_grad_before_another_rank_leads_is_named",
    ),
    Mutant(
        "joinables/ddp/buffers.py",
        "changed != active and (changed or self._changed)",
        "False",
        "tests/joinables/test_state_at_end.py::test_buffers_that_some_ranks_change_are_an_error_on_all",
    ),
    Mutant(
        "joinables/ddp/buffers.py",
        "known.get(name, shape)",
        "shape",
        "tests/joinables/ddp/test_buffers.py::test_a_buffer_that_grew_on_one_rank_between_two_blocks_is_named",
    ),
    Mutant(
        "joinables/ddp/buffers.py",
        "        self._last_header = channel.headers.last\n",
        "",
        "tests/joinables/test_state_at_end.py::test_buffers_of_all_modules_come_from_the_same_rank",
    ),
    # -- parameters ----------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/ddp/parameters.py",
        "if absent and not is_used:",
        "if not is_used:",
        "tests/joinables/ddp/test_filled_windows.py::test_a_parameter_that_dummies_alone_use_keeps_its_gradient",
    ),
    Mutant(
        "joinables/ddp/parameters.py",
        "if self._handles and not self._join.channel.step.shadowing:",
        "if self._handles:",
        "tests/join/loop/test_training.py::test_what_only_dummies_used_has_no_gradient_after_a_backward_that_all_skip",
    ),
    Mutant(
        "joinables/ddp/parameters.py",
        "gradient * self.factor if self.factor else torch.zeros_like(gradient)",
        "gradient * self.factor",
        "tests/joinables/ddp/test_weight.py::test_weight_0_of_a_gradient_that_is_no_number",
    ),
    Mutant(
        "joinables/ddp/parameters.py",
        "            self._share(collective, [0] * len(self._parameters))",
        "            pass",
        "tests/joinables/ddp/test_exact.py::test_equals_one_process[static_graph]",
    ),
    Mutant(
        "joinables/ddp/parameters.py",
        'collective.all_reduce(counts, "max")',
        'collective.all_reduce(counts, "min")',
        "tests/joinables/ddp/test_exact.py::test_equals_one_process[static_graph, zero, tiny buckets]",
    ),
    Mutant(
        "joinables/ddp/parameters.py",
        'self._join.collective.all_reduce(self._used, "max").wait()',
        "pass",
        "tests/join/loop/test_training.py::test_a_backward_that_all_skip_forgets_nobody",
    ),
    # -- ZeRO ----------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/zero.py",
        "self._channel.headers.active_for(self) < self._collective.world_size",
        "False",
        "tests/joinables/test_zero.py::test_a_learning_rate_that_is_raised",
    ),
    Mutant(
        "joinables/zero.py",
        "float(value) if is_leader else 0.0",
        "float(value)",
        "tests/joinables/test_zero.py::test_hyperparameters_are_those_of_one_active_rank",
    ),
    Mutant(
        "joinables/zero.py",
        "int(number) if isinstance(value, int) and number.is_integer() else number",
        "number",
        "tests/joinables/test_zero.py::test_hyperparameters_are_those_of_one_active_rank",
    ),
    Mutant(
        "joinables/zero.py",
        "                self._transform_gradients()",
        "                pass",
        "tests/joinables/ddp/test_exact.py::test_equals_one_process[zero with clipping]",
    ),
    Mutant(
        "joinables/zero.py",
        "if not self._shadowing and not has_closure:",
        "if not self._shadowing:",
        "tests/joinables/test_zero.py::test_zero_step_with_closure",
    ),
    Mutant(
        "joinables/zero.py",
        "        self._channel.check_equal([(self.join_name, group_values(self._stepped_by))])",
        "        pass",
        "tests/joinables/test_zero.py::test_a_rank_that_leaves_before_a_step_that_others_make_at_another_rate",
    ),
    Mutant(
        "joinables/zero.py",
        "if self._is_scaled and self._channel.lockstep is None and",
        "if self._is_scaled and",
        "tests/joinables/test_zero.py::test_a_gradient_scaler_that_every_rank_steps_or_none",
    ),
    Mutant(
        "joinables/zero.py",
        "            self._load_hyperparameters(pytree.tree_unflatten(received, structure))",
        "            pass",
        "tests/joinables/test_zero.py::test_a_learning_rate_that_is_raised",
    ),
    # -- state ---------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/state.py",
        "if parameter.grad is not None and id(parameter) not in self._ignored:",
        "if id(parameter) not in self._ignored:",
        "tests/joinables/test_state_at_end.py::test_a_step_without_gradients_does_not_count",
    ),
    Mutant(
        "joinables/state.py",
        "        if extra:\n",
        "        if False:\n",
        "tests/joinables/test_state_at_end.py::test_what_cannot_be_copied_is_an_error_on_all_ranks",
    ),
    Mutant(
        "joinables/state.py",
        "if own_shapes != their_shapes:",
        "if False:",
        "tests/joinables/test_state_at_end.py::test_what_cannot_be_copied_is_an_error_on_all_ranks",
    ),
    Mutant(
        "joinables/state.py",
        "        if not why_not and keeps:\n",
        "        if False:\n",
        "tests/joinables/test_state.py::test_ranks_that_differ_are_named",
    ),
    Mutant(
        "joinables/state.py",
        "                mark_stepped(optimizer)",
        "                pass",
        "tests/joinables/test_state.py::test_a_scheduler_that_is_not_listed_steps_after_a_block_without_data",
    ),
    Mutant(
        "joinables/state.py",
        "type(leaf) not in _PLAIN or",
        "",
        "tests/joinables/test_state_at_end.py::test_what_cannot_be_copied_is_an_error_on_all_ranks",
    ),
    Mutant(
        "joinables/state.py",
        "            broadcast_tensors(self._collective, matching, source)",
        "            pass",
        "tests/joinables/test_state_at_end.py::test_buffers_of_an_average_follow",
    ),
    Mutant(
        "joinables/state.py",
        "        if self._channel.lockstep is None:\n            self.own_steps += 1",
        "        if True:\n            self.own_steps += 1",
        "tests/joinables/test_state_at_end.py::test_a_step_without_gradients_does_not_count",
    ),
    Mutant(
        "joinables/state.py",
        'for name in sorted(group.keys() - {"params"})',
        'for name in group if name != "params"',
        "tests/joinables/test_zero.py::test_hyperparameters_in_another_order",
    ),
    # -- modules with collectives of their own -------------------------------------------------------------------------
    Mutant(
        "joinables/own_collectives.py",
        "        broadcast_tensors(self._collective, buffers, source)",
        "        pass",
        "tests/joinables/test_own_collectives.py::test_report_and_statistics",
    ),
    Mutant(
        "joinables/own_collectives.py",
        "return output + sum(zero_of(tensor, output) for tensor in (*args, *norm.parameters()))",
        "return output",
        "tests/joinables/test_own_collectives.py::test_synchronised_norm_equals_one_process[fully_shard]",
    ),
    Mutant(
        "joinables/own_collectives.py",
        "        if self._handles and self._channel.lockstep is None:",
        "        if False:",
        "tests/join/failure/test_training.py::test_a_backward_after_the_loop_in_which_its_forward_ran_on_a_dummy",
    ),
    Mutant(
        "joinables/own_collectives.py",
        "channel.end_broken_loop()",
        "pass",
        "tests/joinables/test_own_collectives.py::test_a_plain_forward_after_a_break_of_one_rank_names_the_break",
    ),
    Mutant(
        "joinables/own_collectives.py",
        "self._is_replaced, output = False, emptied_output(output)",
        "self._is_replaced = False",
        "tests/joinables/test_own_collectives.py::test_a_module_that_takes_no_empty_batch",
    ),
    # -- dummies -------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/dummy_forward.py",
        "is_last = channel.step.batch is StepBatch.LAST",
        "is_last = False",
        "tests/joinables/test_dummy_calls.py::test_each_call_on_a_dummy_runs_as_in_the_last_step_with_data",
    ),
    Mutant(
        "joinables/dummy_forward.py",
        "calls[min(self._number, len(calls)) - 1]",
        "calls[0]",
        "tests/joinables/test_dummy_calls.py::test_each_call_on_a_dummy_runs_as_in_the_last_step_with_data",
    ),
    Mutant(
        "joinables/dummy_forward.py",
        "torch.ones(2, *tensor.shape[1:]",
        "torch.ones(1, *tensor.shape[1:]",
        "tests/joinables/test_dummy_calls.py::test_a_module_that_takes_two_rows_at_least",
    ),
    Mutant(
        "joinables/dummy_forward.py",
        "tensor[:0].clone() if tensor.dim() else zero_of(tensor, tensor)",
        "tensor[:0].clone() if tensor.dim() else tensor",
        "tests/joinables/test_dummy_forward.py::test_it_trains_exactly",
    ),
    Mutant(
        "joinables/dummy_forward.py",
        "return tensor.detach() + sum(zero_of(source, tensor) for source in sources)",
        "return tensor.detach()",
        "tests/joinables/test_own_collectives.py::test_a_chain_of_modules[ddp]",
    ),
    # -- metrics -------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/metrics.py",
        "part._computed = None  # after",
        "pass  # after",
        "tests/joinables/metrics/test_metric.py::test_the_last_value_is_not_taken_for_this_ranks_inside_the_next_block",
    ),
    Mutant(
        "joinables/metrics.py",
        "own.callback(put, part, part.update_count, part.metric_state)",
        "pass",
        "tests/joinables/metrics/test_metric.py::test_no_sample_counts_twice",
    ),
    Mutant(
        "joinables/metrics.py",
        "self._channel.step.shadowing or is_empty",
        "self._channel.step.shadowing",
        "tests/joinables/metrics/test_metric.py::test_batches_without_samples_are_skipped",
    ),
    Mutant(
        "joinables/metrics.py",
        "self._channel.step.shadowing or is_empty",
        "is_empty",
        "tests/joinables/metrics/test_metric.py::test_dummies_do_not_count",
    ),
    Mutant(
        "joinables/metrics.py",
        "sum(value * count for value, count in zip(values, counts, strict=True)) / sum(counts)",
        "sum(values) / len(values)",
        "tests/joinables/metrics/test_metric.py::test_states_of_every_kind",
    ),
    Mutant(
        "joinables/metrics.py",
        "lambda: False)  # it does not",
        "lambda: True)  # it does not",
        "tests/joinables/metrics/test_metric.py::test_the_last_value_is_not_taken_for_this_ranks_inside_the_next_block",
    ),
    # -- wrappers ------------------------------------------------------------------------------------------------------
    Mutant(
        "joinables/wrapped.py",
        'inner if state is None or state is getattr(inner, "state", None) else None',
        "inner",
        "tests/joinables/test_state_at_end.py::test_a_wrapper_with_state_of_its_own",
    ),
    Mutant(
        "joinables/wrapped.py",
        " and inner.state is not optimizer.state:",
        ":",
        "tests/joinables/test_wrapped.py::test_an_optimizer_that_shares_its_state_with_the_one_inside",
    ),
    # -- losses of LossGate --------------------------------------------------------------------------------------------
    Mutant(
        "joinables/loss_gate.py",
        "isinstance(node, BackwardCFunction) or ",
        "",
        "tests/joinables/test_loss_gate.py::test_a_loss_behind_a_reentrant_checkpoint_is_returned_as_it_is",
    ),
    Mutant(
        "joinables/loss_gate.py",
        "if not loss.requires_grad or self._is_reached_from(loss):",
        "if True:",
        "tests/joinables/test_loss_gate.py::test_a_loss_that_reaches_nothing_gives_gradients_of_0",
    ),
]
