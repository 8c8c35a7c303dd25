"""On two devices over hccl, with native ops: overlapped communication and a swapped optimizer change no bit."""

from __future__ import annotations

import torch

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from mindspeed.core.optimizer.swap_optimizer import SwapOptimizer
from mindspeed.ops import train_ops
from tests.megatron.model_helpers import packed_batch, tiny_config
from tests.parallel.launcher import run_ranks

NUM_STEPS = 3


def _train(groups: ProcessGroups, is_special: bool) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    config = tiny_config(
        num_layers=2,
        moe_layer_freq=[0, 1],
        params_dtype=torch.bfloat16,
        sequence_parallel=groups.layout.tensor_model_parallel_size > 1,
        calculate_per_token_loss=True,
        moe_shared_expert_overlap=is_special,
    )
    ops, device = train_ops(), torch.device("npu", torch.npu.current_device())
    model = GPTModel(config, groups, ops)
    model.init_weights(7)
    ddp_config = DistributedDataParallelConfig(
        bucket_size=4000, overlap_grad_reduce=is_special, overlap_param_gather=is_special
    )
    ddp = DistributedDataParallel(config, ddp_config, model.to(device), groups)
    optimizer_config = OptimizerConfig(lr=1e-2, clip_grad=0.5)
    if is_special:
        optimizer = SwapOptimizer(optimizer_config, ddp, groups, ops, swap_times=5)
    else:
        optimizer = get_megatron_optimizer(optimizer_config, ddp, groups, ops)
    losses, grad_norms = [], []
    for step in range(NUM_STEPS):
        batch = packed_batch([5, 9, 2], config.vocab_size, seed=2 * step + groups.coords.dp)
        optimizer.zero_grad()
        logits_TV = ddp(batch.ids_T.to(device), batch.positions_T.to(device), batch.params)
        loss = vocab_parallel_cross_entropy(logits_TV, batch.labels_T.to(device), groups.tp, ops).mean()
        loss.backward()
        finalize_model_grads(ddp, groups)
        is_updated, grad_norm, _ = optimizer.step()
        assert is_updated
        losses.append(loss.item())
        grad_norms.append(grad_norm)
    return losses, grad_norms, {name: tensor.cpu() for name, tensor in ddp.state_dict().items()}


def _ranks() -> None:
    for tp in (1, 2):
        groups = initialize_model_parallel(tp, expert_model_parallel_size=2)
        plain, special = _train(groups, False), _train(groups, True)
        assert special[:2] == plain[:2]
        assert all(torch.isfinite(torch.tensor(values)).all() for values in plain[:2])
        for name, tensor in special[2].items():
            assert torch.equal(tensor, plain[2][name]), f"TP {tp}: {name}"
        destroy_model_parallel()


def test_overlap_and_swap_change_no_bit() -> None:
    run_ranks(_ranks, 2, device="npu", timeout_s=150)
