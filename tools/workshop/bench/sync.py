"""``python -m tools.workshop.bench.sync``: weights by the transfer plan, beside gathering every tensor.

Processes over gloo hold the training shards and the rollout engine of one mixture of experts; both ways take turns on
the same shards. ``--plan`` prints what DeepSeek-V3 moves on 256 ranks instead, and how long the plan takes to build.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
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

from hf_formats.config import load_hf_config, parse_hf_config
from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import destroy_model_parallel, initialize_from_layout
from mindspeed_llm.export_weights import gather_hf_tensors
from mindspeed_llm.hf_shapes import hf_tensors
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weight_source import hf_view
from tools.workshop.bench.engines.engine_server import Stopwatch
from tools.workshop.bench.models import deepseek_v3_config
from tools.workshop.bench.options import aligned
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.sharding_manager import weight_sync, weight_transfer
from verl.workers.sharding_manager.transfer_plan import build_plan
from verl.workers.sharding_manager.weight_sync import WeightSync
from vllm.config import ParallelConfig
from vllm.model_executor.model_loader import shard_writer
from vllm.model_executor.model_loader.digest import copy_with_digests
from vllm.model_executor.model_loader.rank_shards import rank_shards
from vllm.transformers_utils.config import load_config

LAYOUT = ParallelLayout(8, 2, 2, expert_model_parallel_size=2)  # to TP2 x DP4, EP8
ROLLOUT_TP = 2
PLAN_COLUMNS = {
    "training": "<38",
    "CPU s": ">6.2f",
    "experts: held": ">13.2f",
    "received": ">8.2f",
    "dense: held": ">11.2f",
    "received ": ">9.2f",
    "sent: mean": ">10.1f",
    "max": ">5.1f",
    "PP broadcast of experts": ">23.1f",
    "rounds": ">6",
}
WAYS = ("plan", "plan without digests", "gather")
DTYPE = torch.bfloat16
# (TP, PP, EP) of training on 256 ranks: experts within a TP rank, and over them ("extend EP")
LARGE_LAYOUTS = {
    "TP4 PP8 EP8, experts whole on a rank": ParallelLayout(
        256, 4, 8, expert_model_parallel_size=8, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7)
    ),
    "TP4 PP8 EP8 extended over TP": ParallelLayout(
        256, 4, 8, expert_model_parallel_size=32, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7)
    ),
    "TP1 PP8 EP32": ParallelLayout(256, 1, 8, expert_model_parallel_size=32, num_layer_list=(6, 8, 8, 8, 8, 8, 8, 7)),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.workshop.bench.sync", description=__doc__)
    parser.add_argument("--plan", action="store_true", help="the plan of DeepSeek-V3 on 256 ranks, nothing is sent")
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--expert-width", type=int, default=1024)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--num-experts", type=int, default=16)
    parser.add_argument("--bucket-megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="rounds of all ways, after one that is not counted")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        if args.plan:
            _print_plans(Path(folder))
            return 0
        config = _config(args.hidden_size, args.expert_width, args.num_layers, args.num_experts)
        (Path(folder) / "config.json").write_text(json.dumps(config))
        world_size = LAYOUT.world_size
        mp.spawn(_rank, (folder, args.bucket_megabytes << 20, args.rounds, args.ways), nprocs=world_size, join=True)
        reports = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(world_size)]
    _print_measured(reports, args.bucket_megabytes << 20)
    return 0


def _config(hidden: int, width: int, num_layers: int, num_experts: int) -> dict[str, Any]:
    """config.json of a small model with DeepSeek-V3's structure."""
    sizes = {"hidden_size": hidden, "intermediate_size": 2 * hidden, "moe_intermediate_size": width}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 256, "kv_lora_rank": 128}
    sizes |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "vocab_size": 2048}
    counts = {"num_hidden_layers": num_layers, "n_routed_experts": num_experts, "num_experts_per_tok": 4}
    counts |= {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    return deepseek_v3_config(**sizes, **counts, max_position_embeddings=4096, eos_token_id=1)


def _rank(rank: int, folder: str, bucket_bytes: int, num_rounds: int, ways: Sequence[str]) -> None:
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
    sync = WeightSync(
        hf,
        LAYOUT,
        DTYPE,
        {peer: rollout.rank_shards(peer) for peer in range(LAYOUT.world_size)},
        groups.world,
        device,
        bucket_bytes=bucket_bytes,
        ranks_per_node=LAYOUT.world_size,
    )

    def by_gathering() -> None:
        names = hf_tensors(hf).keys()
        stream = gather_hf_tensors(params, names, hf, groups, dtype=DTYPE, device=device, bucket_bytes=bucket_bytes)
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
        "buffers": sync.transfer.peak_bytes,
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

    def copy(name: str, target: Tensor, values: Tensor, starts: tuple[int, ...], **_: Tensor | None) -> None:
        copy_with_digests(name, target, values, starts)

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (weight_transfer, "copy_with_digests", copy),
            (shard_writer, "copy_with_digests", copy),
            (weight_transfer, "add_digest", lambda *_: None),
            (weight_sync.WeightsCheck, "require_equal", lambda *_: None),
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


def _print_measured(reports: list[dict[str, Any]], bucket_bytes: int) -> None:
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
    print(f"  two buckets are {2 * bucket_bytes >> 20}, all buffers alive at a time {buffers >> 20}")


def _print_plans(folder: Path) -> None:
    config = deepseek_v3_config(num_nextn_predict_layers=0, eos_token_id=1)
    (folder / "config.json").write_text(json.dumps(config))
    hf = parse_hf_config(config)
    print("DeepSeek-V3 in bfloat16, 256 ranks in nodes of 16, to TP2 x DP128 EP256; GB (10^9 bytes) of a rank, at most")
    rows = []
    for name, layout in LARGE_LAYOUTS.items():
        start = time.process_time()
        rollout_hf = load_config(str(folder))
        rollout_shards = {
            rank: rank_shards(rollout_hf, ParallelConfig(2, 128, True, rank, 256), torch.bfloat16)
            for rank in range(256)
        }
        plan = build_plan(hf, layout, torch.bfloat16, rollout_shards, 256, bucket_bytes=512 << 20, ranks_per_node=16)
        seconds = time.process_time() - start
        t = plan.traffic()
        # Upstream broadcasts a stage's experts to all stages: each rank gets those of its EP rank, of all layers.
        broadcast = 58 * 256 // layout.expert_model_parallel_size * 3 * 7168 * 2048 * 2
        figures = (t.expert_held, t.expert_received, t.held - t.expert_held, t.received - t.expert_received)
        largest = (figure.max() / 1e9 for figure in figures)
        sent = (t.sent.mean() / 1e9, t.sent.max() / 1e9)
        rows.append((name, seconds, *largest, *sent, broadcast / 1e9, plan.num_rounds))
    print("\n".join(aligned(PLAN_COLUMNS, rows)))


if __name__ == "__main__":
    raise SystemExit(main())
