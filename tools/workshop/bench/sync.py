"""``python -m tools.workshop.bench.sync``: weights by the transfer plan, beside gathering every tensor.

Processes over gloo hold the training shards and the rollout engine of one mixture of experts; both ways take turns on
the same shards. What a large model moves between its ranks is in the plan of its run (``python -m tools.plan``).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch
from zlib import crc32

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from hf_formats.config import load_hf_config
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_from_layout
from mindspeed_llm.export_weights import gather_hf_tensors
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weight_source import hf_view
from tools.workshop.bench.engines.engine_server import Stopwatch
from tools.workshop.bench.models import deepseek_v3_config
from tools.workshop.bench.options import parser_of, write_report
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.weight_sync import sync as weight_sync
from verl.workers.weight_sync.plan import build_plan
from verl.workers.weight_sync.sync import WeightSync
from verl.workers.weight_sync.weights_check import WeightsCheck
from vllm.model_executor.model_loader import shard_writer
from vllm.model_executor.model_loader.digest import copy_with_digests

LAYOUT = ParallelLayout(8, 2, 2, expert_model_parallel_size=2)  # to TP2 x DP4, EP8
ROLLOUT_TP = 2
WAYS = ("plan", "plan without digests", "gather")
DTYPE = torch.bfloat16
BUCKET_BYTES = 64 << 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("sync", __doc__)
    parser.add_argument("--hidden-size", type=int, default=2048, help="of the model; an expert is half as wide")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways, after one that is not counted")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_config(options.hidden_size)))
        mp.spawn(_rank, (folder, options.rounds, options.ways), nprocs=LAYOUT.world_size, join=True)
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(LAYOUT.world_size)]
    _print_measured(reports)
    write_report(options.json, reports)
    return 0


def _config(hidden: int) -> dict[str, Any]:
    """config.json of a small model with DeepSeek-V3's structure."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "moe_intermediate_size": hidden // 2}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128}
    sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 2048}
    counts = {"num_hidden_layers": 4, "n_routed_experts": 16, "num_experts_per_tok": 4}
    counts |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    return deepseek_v3_config(**sizes, **counts, max_position_embeddings=4096, eos_token_id=1)


def _rank(rank: int, folder: str, num_rounds: int, ways: Sequence[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", LAYOUT.world_size),
        rank=rank,
        world_size=LAYOUT.world_size,
        timeout=timedelta(minutes=5),
    )
    groups = initialize_from_layout(LAYOUT)
    hf, device = load_hf_config(folder), torch.device("cpu")
    params = _params(folder, rank)
    rollout = _engine(folder)
    size = LAYOUT.world_size
    shards = {peer: rollout.rank_shards(peer) for peer in range(size)}
    plan = build_plan(hf, LAYOUT, DTYPE, shards, size, bucket_bytes=BUCKET_BYTES, ranks_per_node=size)
    sync = WeightSync(plan, shards[rank], groups.world, device)

    def by_gathering() -> None:
        names = hf_tensors(hf).keys()
        stream = gather_hf_tensors(params, names, hf, groups, dtype=DTYPE, device=device, bucket_bytes=BUCKET_BYTES)
        rollout.inference_engine.update_weights(stream, 1)

    by_plan = partial(sync.run, params, rollout, 1)
    works: dict[str, Callable[[], None]] = {
        "plan": by_plan,
        "plan without digests": _without_digests()(by_plan),
        "gather": by_gathering,
    }
    # To and fro: what comes after the gathering finds the heap and the caches as that has left them.
    orders = (ways[:: -1 if i % 2 else 1] for i in range(num_rounds + 1))
    rounds = [{way: _measured(works[way]) for way in order} for order in orders]
    traffic = sync.plan.traffic()
    report = {
        "rounds": rounds[1:],
        "received": int(traffic.received[rank]),
        "held": int(traffic.held[rank]),
        "buffers": sync.peak_bytes,
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    destroy_model_parallel()
    dist.destroy_process_group()


def _params(folder: str, rank: int) -> dict[str, Tensor]:
    """This rank's training shards: for every tensor the same values on all ranks that hold a part of it."""
    hf, params = load_hf_config(folder), {}
    largest = max(int(np.prod(shape)) for shape, _ in hf_tensors(hf).values())
    base = torch.randn(largest + 4096, generator=torch.Generator().manual_seed(0))
    for tensor in local_plan(hf, LAYOUT, rank):
        params[tensor.name] = torch.empty(tensor.shape, dtype=torch.float32 if tensor.is_buffer else DTYPE)
        for shard in tensor.shards:
            shape = hf_tensors(hf)[shard.hf_name][0]
            whole = base[crc32(shard.hf_name.encode()) % 4096 :][: int(np.prod(shape))].view(shape)
            hf_view(params[tensor.name], shard).copy_(whole[tuple(slice(*ends) for ends in shard.ranges)])
    return params


def _engine(folder: str) -> vLLMRollout:
    config = RolloutConfig(
        tensor_model_parallel_size=ROLLOUT_TP,
        prompt_length=16,
        response_length=16,
        max_num_seqs=4,
        num_gpu_blocks_override=16,
        enforce_eager=True,
    )
    rollout = vLLMRollout(config, folder, rollout_ops="vllm.ops.cpu:default_ops", device=torch.device("cpu"))
    rollout.resume(["weights"])
    return rollout


@contextmanager
def _without_digests() -> Iterator[None]:
    """Weights are copied; no digest is taken or compared."""

    def copy(name: str, target: Tensor, values: Tensor, starts: tuple[int, ...], **_: Any) -> None:
        copy_with_digests(name, target, values, starts)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (weight_sync, "copy_with_digests", copy),
            (shard_writer, "copy_with_digests", copy),
            (WeightsCheck, "require_equal", lambda *_: None),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


def _measured(work: Callable[[], None]) -> dict[str, float]:
    """One rank's seconds, CPU seconds, and bytes on top of what it had before."""
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    dist.barrier()
    stopwatch = Stopwatch()
    work()
    figures = stopwatch.read()
    return figures | {"peak_bytes": figures["peak_bytes"] - before}


def _print_measured(reports: list[dict[str, Any]]) -> None:
    num_rounds, ways = len(reports[0]["rounds"]), [way for way in WAYS if way in reports[0]["rounds"][0]]

    def each_round(way: str, key: str, over_ranks: Callable[[list[float]], float]) -> list[float]:
        return [over_ranks([report["rounds"][i][way][key] for report in reports]) for i in range(num_rounds)]

    received, held = [report["received"] for report in reports], [report["held"] for report in reports]
    print(f"{LAYOUT.world_size} processes over gloo, TP2 PP2 EP2 to DP4 x TP2 EP8, {num_rounds} rounds, MiB of a rank:")
    print(f"  holds {min(held) >> 20} to {max(held) >> 20}, receives {min(received) >> 20} to {max(received) >> 20}")
    print(f"  received / held at most {max(r / h for r, h in zip(received, held, strict=True)):.3f}")
    for way in ways:
        seconds, cpu = median(each_round(way, "seconds", max)), median(each_round(way, "cpu_seconds", sum))
        peak = max(each_round(way, "peak_bytes", max))
        print(
            f"  {way:20} {seconds:7.3f} s (median), CPU of all ranks {cpu:7.3f} s, peak extra memory {peak / 2**20:.0f}"
        )

    def ratios(key: str, over_ranks: Callable[[list[float]], float], way: str) -> list[float]:
        pairs = zip(each_round(way, key, over_ranks), each_round("plan", key, over_ranks), strict=True)
        return [other / plan for other, plan in pairs]

    if "gather" in ways:
        slower = ratios("seconds", max, "gather")
        print(f"  gathering takes {median(slower):.2f} times as long, {min(slower):.2f} at the least")
    if "plan without digests" in ways:
        cpu = 1 - median(ratios("cpu_seconds", sum, "plan without digests"))
        wall = 1 - median(ratios("seconds", max, "plan without digests"))
        print(f"  digests are {cpu:.1%} of the sync's CPU time, {wall:.1%} of its time (medians of pairs)")
    buffers = max(report["buffers"] for report in reports)
    print(f"  two buckets are {2 * BUCKET_BYTES >> 20}, all buffers alive at a time {buffers >> 20}")


if __name__ == "__main__":
    raise SystemExit(main())
