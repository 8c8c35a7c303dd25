"""``python -m tools.workshop.bench.scale``: what a job of many ranks costs before it computes anything, in one process.

Groups are made on torch's fake backend (nothing is sent), layers and coordinates are worked out for every rank, and a
batch of reasoning-like lengths is balanced over data-parallel ranks and cut into micro-batches on one of them.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.parallel_state import GROUP_AXES, destroy_model_parallel, group_ranks, initialize_from_layout
from verl.utils.partitions import balanced_order, partitions_within

NUM_LAYERS, ROWS_PER_REPLICA, MAX_TOKENS = 61, 1024, 8192
LAYOUTS = {
    256: ParallelLayout(
        256, 4, 8, expert_model_parallel_size=32, num_layer_list=(7, 7, 8, 8, 8, 8, 8, 7)
    ),  # r1_zero on 16 Atlas A3 nodes
    16384: ParallelLayout(16384, 8, 16, 4, expert_model_parallel_size=64, num_layer_list=(3, *[4] * 14, 2)),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the seconds of each part for each size; returns the exit code."""
    argparse.ArgumentParser(prog="python -m tools.workshop.bench.scale", description=__doc__).parse_args(argv)
    print(f"{'ranks':>6} {'part':52} {'seconds':>8}")
    for world_size, layout in LAYOUTS.items():
        assert layout.problems(NUM_LAYERS) == []
        total = 0.0
        for name, part in _parts(layout).items():
            start = time.perf_counter()
            part()
            seconds = time.perf_counter() - start
            total += seconds
            print(f"{world_size:6} {name:52} {seconds:8.3f}", flush=True)
        print(f"{world_size:6} {'all':52} {total:8.3f}")
    return 0


def _parts(layout: ParallelLayout) -> dict[str, Callable[[], object]]:
    num_replicas = layout.data_parallel_size
    rng = random.Random(0)
    lengths = [min(4096, 200 + round(rng.lognormvariate(6.0, 0.9))) for _ in range(num_replicas * ROWS_PER_REPLICA)]
    return {
        "coordinates and layers of every rank": lambda: [
            layout.stage_layers(layout.coords(rank).pp, NUM_LAYERS) for rank in range(layout.world_size)
        ],
        "members of every group": lambda: [group_ranks(layout, name) for name in GROUP_AXES],
        "process groups of one rank (fake backend)": lambda: _make_groups(layout),
        f"{len(lengths)} rows balanced over {num_replicas} replicas": lambda: balanced_order(
            lengths, num_replicas, len(lengths) // 4
        ),
        f"micro-batches of one replica ({ROWS_PER_REPLICA} rows)": lambda: partitions_within(
            lengths[:ROWS_PER_REPLICA], MAX_TOKENS
        ),
    }


def _make_groups(layout: ParallelLayout) -> None:
    dist.init_process_group("fake", rank=layout.world_size // 2, world_size=layout.world_size, store=FakeStore())
    initialize_from_layout(layout)
    destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    raise SystemExit(main())
