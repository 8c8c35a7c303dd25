"""Some ranks train, others generate: samples outlive weight syncs and engines, and each token has its version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_formats.config import load_hf_config
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import initialize_from_layout
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from tests.verl.test_weight_sync import params_of
from verl.protocol import DataProto
from verl.workers.config import RolloutConfig
from verl.workers.rollout.rollout_messages import PROMPT, SAMPLE, VERSIONS
from verl.workers.rollout.vllm_rollout.sample_stream import SampleStream
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import all_rank_shards, vLLMRollout
from verl.workers.weight_sync.plan import build_plan
from verl.workers.weight_sync.sync import WeightSync

NUM_TRAINING, NUM_ROLLOUT = 2, 2
LAYOUT = ParallelLayout(NUM_TRAINING, 1, 2)
META = {"eos_token_id": 1, "pad_token_id": 0}
CONFIG = RolloutConfig(
    prompt_length=8,
    response_length=24,
    max_num_seqs=4,
    num_gpu_blocks_override=32,
    enforce_eager=True,
    dtype="float32",
    ignore_eos=True,
)


def requests(first: int, count: int) -> DataProto:
    """Two samples of each of some prompts."""
    keys = [(prompt, sample) for prompt in range(first, first + count) for sample in range(2)]
    columns: dict[str, list[Any]] = {
        "raw_prompt_ids": [[3 + prompt % 100, 7, 11] for prompt, _ in keys],
        "sampling_seeds": [1000 * prompt + sample for prompt, sample in keys],
        "response_limit": [0 if prompt % 2 else 5 for prompt, _ in keys],
        PROMPT: [prompt for prompt, _ in keys],
        SAMPLE: [sample for _, sample in keys],
    }
    return DataProto.from_dict(non_tensors=columns, meta_info=dict(META))


def rows_of(parts: list[DataProto]) -> dict[tuple[int, int], Any]:
    """(prompt, sample) -> tokens, log-probs and versions."""
    found = {}
    for rows in parts:
        for row in range(len(rows)):
            mask = rows.batch["response_mask"][row].bool()
            key = (rows.non_tensor_batch[PROMPT][row], rows.non_tensor_batch[SAMPLE][row])
            assert key not in found
            log_probs = rows.batch["rollout_log_probs"][row][mask].tolist()
            found[key] = (rows.batch["responses"][row][mask].tolist(), log_probs, rows.non_tensor_batch[VERSIONS][row])
    return found


def rank(path: str) -> Any:
    """The results of a rollout rank for an undisturbed stream, and for one that a second engine takes over at syncs."""
    hf, device, group = load_hf_config(path), torch.device("cpu"), dist.group.WORLD
    assert group is not None
    rollout_shards = {NUM_TRAINING + r: shards for r, shards in all_rank_shards(CONFIG, path, NUM_ROLLOUT).items()}
    is_training = dist.get_rank() < NUM_TRAINING
    if is_training:
        groups = initialize_from_layout(LAYOUT, num_other_ranks=NUM_ROLLOUT)
        assert groups.world.size() == NUM_TRAINING and groups.rank == dist.get_rank()
        params = params_of(path, LAYOUT, dist.get_rank(), torch.float32)
    rollouts = []
    for _ in range(2):
        if not is_training:
            ops = "vllm.ops.cpu:default_ops"
            rollouts.append(vLLMRollout(CONFIG, path, rollout_ops=ops, device=device, first_rank=NUM_TRAINING))
            rollouts[-1].resume(["weights"])
            rollouts[-1].resume(["kv_cache"])
    results = []
    for is_moved in (False, True):
        sizes = {"bucket_bytes": 128 << 10, "ranks_per_node": 2}
        plan = build_plan(hf, LAYOUT, torch.float32, rollout_shards, group.size(), **sizes)
        syncs = [WeightSync(plan, rollout_shards.get(group.rank(), {}), group, device) for _ in range(2)]
        streams = [SampleStream(rollout) for rollout in rollouts]
        place, parts = 0, []
        for version in range(3):
            if is_training:
                changed = {name: tensor * (1 + 0.1 * version) for name, tensor in params.items()}
                syncs[place].run(changed, None, version)
            else:
                streams[place].withdraw()
                syncs[place].run({}, rollouts[place], version)
                streams[place].start(requests(100 * dist.get_rank() + 3 * version, 3))
                outputs = streams[place].run(7 if version < 2 else 1000, META)
                parts.append(streams[place].rows(outputs, META) if outputs else DataProto())
            if is_moved:
                state = [] if is_training else streams[place].state()
                place = (place + 1) % 2
                if not is_training:
                    streams[place] = SampleStream(rollouts[place])
                    streams[place].restore(state)
        results.append(rows_of(parts))
    return results


def test_samples_go_on_over_syncs_and_in_another_engine_to_the_same_bits(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, tiny_hf_config(num_hidden_layers=4), seed=1, dtype=torch.float32)
    for number, (whole, moved) in enumerate(run_ranks(rank, NUM_TRAINING + NUM_ROLLOUT, str(tmp_path))):
        assert moved == whole
        if number < NUM_TRAINING:
            assert whole == {}
            continue
        assert len(whole) == 18
        for (prompt, _), (tokens, log_probs, versions) in whole.items():
            assert len(tokens) == len(log_probs) == sum(count for _, count in versions) == (24 if prompt % 2 else 5)
            assert [version for version, _ in versions] == sorted({version for version, _ in versions})
        assert any(len(versions) == 3 for *_, versions in whole.values())
