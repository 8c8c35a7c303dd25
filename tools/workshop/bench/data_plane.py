"""``python -m tools.workshop.bench.data_plane``: a batch by reference beside a batch through the controller.

A real Ray, the trainer's own calls, and 256 ranks that only give and take; a few processes play them all. What an
update reads of a generated batch (tokens, masks, log-probs) goes from its owners to its consumers: ``collect`` until it
is one batch of the controller, ``deal`` its rows in another order, ``dispatch`` with advantages until the last consumer
has been called. What is collected in ``either`` way are responses and their mask, which the controller scores. The ways
take turns in one run; figures are medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import ray
import torch

from tools.workshop.bench.options import aligned, parser_of, write_report
from verl.protocol import DataProto
from verl.row_refs import RowRefs
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker_group import PendingCall
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.row_store import controller_batch, worker_batch

BY_REFERENCE, THROUGH, EITHER = "by reference", "through the controller", "either"
TENSORS = ("input_ids", "attention_mask", "response_mask", "rollout_log_probs")
COLUMNS = {
    "phase": "<9",
    "way": "<23",
    "MB": ">8.1f",
    "controller s": ">13.3f",
    "cpu s": ">7.3f",
    "last rank s": ">12.3f",
}


class Rank(Worker):
    """A rank that returns generated rows and receives its part of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self._answers: dict[str, DataProto] = {}

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def ready(self, number: int) -> int:
        """Return the number: the rank has finished all earlier calls."""
        return number

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def generate(self, prompts: DataProto, lengths: tuple[int, int], way: str) -> DataProto:
        """A row for each of ``prompts``, of full length, as it would be sent in this way; made at the first call."""
        if not self._answers:
            rows = generated(len(prompts), *lengths)
            places = np.zeros((len(rows), 3), dtype=np.int32)
            self._answers = {
                BY_REFERENCE: DataProto(row_refs=RowRefs(dict.fromkeys(TENSORS, places))),
                THROUGH: rows.select(batch_keys=TENSORS),
                EITHER: controller_batch(rows),
            }
        return self._answers[way]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def train(self, part: DataProto) -> float:
        """When the part was here, by the machine's clock."""
        return time.monotonic()


class PlayedGroup(RayWorkerGroup):
    """``num_ranks`` ranks on a few processes; all that the controller does is the real thing."""

    def __init__(self, num_ranks: int, num_processes: int) -> None:
        pool = RayResourcePool([num_processes])
        super().__init__(pool, RayClassWithInitArgs(Rank), num_cpus_per_worker=1 / num_processes)
        self.world_size = num_ranks
        self._actors = [self._actors[rank % num_processes] for rank in range(num_ranks)]
        self._addresses = [self._addresses[rank % num_processes] for rank in range(num_ranks)]


def generated(num_rows: int, prompt_length: int, response_length: int) -> DataProto:
    """Rows of full length with the columns and types of the rollout's."""
    ids = torch.randint(1, 129280, (num_rows, prompt_length + response_length))
    mask = torch.ones_like(ids)
    return DataProto.from_dict(
        {
            "responses": ids[:, prompt_length:],
            "input_ids": ids,
            "attention_mask": mask,
            "response_mask": mask[:, prompt_length:],
            "rollout_log_probs": -torch.rand(num_rows, response_length),
        }
    )


def measure(group: PlayedGroup, num_rows: int, lengths: tuple[int, int]) -> dict[tuple[str, str], dict[str, float]]:
    """What every (phase, way) costs.

    ``controller_s`` until the controller is free again, ``cpu_s`` of its process in that time, ``megabytes`` of its
    batch, and of a dispatch ``last_s`` until the last consumer has its part.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}

    def timed(phase: str, way: str, call: Callable[[], Any]) -> Any:
        """What ``call`` returns, timed once nothing that was asked before is under way."""
        group.ready([0] * group.world_size)
        seconds, cpu = time.monotonic(), time.process_time()
        output = call()
        cost = {"controller_s": time.monotonic() - seconds, "cpu_s": time.process_time() - cpu}
        request = output if isinstance(output, DataProto) else output[0]
        found[phase, way] = cost | {"megabytes": request.num_tensor_bytes / 1e6, "last_s": 0.0}
        return output

    prompts = DataProto.from_dict({"row": torch.arange(num_rows)})
    answers = timed("collect", EITHER, lambda: group.generate(prompts, lengths, EITHER))
    mask_BR = answers.batch["response_mask"]
    advantages = DataProto.from_dict({"advantages": torch.randn(num_rows, 1) * mask_BR})
    for way in (BY_REFERENCE, THROUGH):
        batch = timed("collect", way, partial(group.generate, prompts, lengths, way))
        batch = timed("deal", way, partial(batch.select_idxs, torch.randperm(num_rows)))
        batch.union(advantages)
        if way == BY_REFERENCE:
            batch.batch["response_mask"] = mask_BR
        _, start_s, pending = timed("dispatch", way, partial(_update, group, batch))
        found["dispatch", way]["last_s"] = max(pending.get()) - start_s
    return found


def _update(group: PlayedGroup, batch: DataProto) -> tuple[DataProto, float, PendingCall]:
    start_s = time.monotonic()
    request = worker_batch(batch, "advantages")
    return request, start_s, group.start("train", request)


def _report(found: dict[tuple[str, str], dict[str, float]]) -> None:
    keys = ("megabytes", "controller_s", "cpu_s")
    rows = [(*key, *(cost[name] for name in keys), cost["last_s"] or None) for key, cost in found.items()]
    print("\n".join(aligned(COLUMNS, rows)))
    ours, theirs = (found["dispatch", way]["controller_s"] for way in (BY_REFERENCE, THROUGH))
    by_reference, through = (
        sum(cost["controller_s"] for (_, way), cost in found.items() if way == chosen)
        for chosen in (BY_REFERENCE, THROUGH)
    )
    print(f"dispatch by reference: {ours:.3f} s")
    print(f"  {through / ours:5.1f} times that: the tensors through the controller (collect, deal, dispatch)")
    print(f"  {theirs / ours:5.1f} times that: their dispatch alone, into this machine's shared memory")
    print(f"all three by reference: {by_reference:.3f} s, {through / by_reference:.1f} times that with the tensors")


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of("data_plane", __doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16, help="samples of each prompt")
    parser.add_argument("--lengths", type=int, nargs=2, default=(1024, 3072), help="tokens of a prompt, of a response")
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--processes", type=int, default=2, help="processes that play the ranks")
    parser.add_argument("--rounds", type=int, default=3, help="after a first one that does not count")
    options = parser.parse_args(argv)
    num_rows = options.prompts * options.samples
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        group = PlayedGroup(options.ranks, options.processes)
        rounds = [measure(group, num_rows, tuple(options.lengths)) for _ in range(options.rounds + 1)]
        group.shutdown()
    finally:
        ray.shutdown()
    found = {
        key: {name: statistics.median(costs[key][name] for costs in rounds[1:]) for name in cost}
        for key, cost in rounds[0].items()
    }
    print(f"{num_rows} rows of {sum(options.lengths)} tokens, {options.ranks} ranks")
    _report(found)
    write_report(options.json, [{"phase": phase, "way": way, **cost} for (phase, way), cost in found.items()])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
