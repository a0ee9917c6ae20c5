"""Private and undocumented APIs of torch that ``joinables`` uses.

Importing it fails with one error on an unsupported torch.
"""

from joinables._torch.versions import require

require(
    {
        "torch._C": ("_current_graph_task_id", "_will_engine_execute_node"),
        "torch:_C._functions.AccumulateGrad": ("_register_hook_dict",),
        "torch._C._dynamo.eval_frame": ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"),
        "torch": ("_foreach_mul_",),
        "torch._utils": ("_flatten_dense_tensors",),
        "torch.autograd": ("_unsafe_preserve_version_counter",),
        "torch.autograd:Variable._execution_engine": ("queue_callback",),
        "torch:Tensor": ("_backward_hooks", "_version"),
        "torch.distributed:Reducer": (
            "_autograd_hook",
            "_check_reducer_finalized",
            "_get_local_used_map",
            "_get_zeros_like_grad_buckets",
            "_rebuild_buckets",
            "_reset_state",
            "prepare_for_backward",
            "prepare_for_forward",
        ),
        "torch.distributed.algorithms.join": ("_JoinConfig",),
        "torch.optim.lr_scheduler": ("LRScheduler",),
        "torch.nn.parallel:DistributedDataParallel": (
            "_assign_modules_buffers",
            "_get_active_ddp_module",
            "_get_ddp_logging_data",
            "_match_all_reduce_for_bwd_pass",
            "_sync_module_buffers",
        ),
    }
)
