"""Copies the weights of a policy version from the ranks that train to the ranks that generate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from hf_formats.ranges import shape_of
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import vLLMRollout
from verl.workers.weight_sync.plan import Transfer, TransferPlan
from verl.workers.weight_sync.rank_rounds import Round, rank_rounds
from verl.workers.weight_sync.trained_weights import agreed_scales, trained_values
from verl.workers.weight_sync.weights_check import WeightsCheck
from vllm.model_executor.model_loader.digest import copy_with_digests, inner_dim
from vllm.model_executor.model_loader.rank_shards import RankShards
from vllm.model_executor.model_loader.shard_writer import ShardWriter

ValuesOf: TypeAlias = Callable[[Transfer], Tensor]


class WeightSync:
    """Sends the weights by a plan that is made once, and then checks every tensor of every rollout engine.

    In each round a rank packs what it sends, and writes what it has received into its rollout engine. While a round is
    in flight the next one is packed and the one before is written. The buffers of a round have at most the plan's
    bucket together, so at most two buckets are in memory.

    Args:
        plan: of `build_plan`, the same on every rank.
        shards: `rank_shards` of this rank's rollout engine; empty where there is none.
        group: all ranks that train or generate; every one of them makes this object and calls ``run``.

    Attributes:
        sums_N: int64 [shards of the plan], of the last run: this rank's part of the digest that rollout engines should
            find of each, in the rollout dtype. It is summed up from the training weights while these are read.
    """

    def __init__(self, plan: TransferPlan, shards: RankShards, group: dist.ProcessGroup, device: torch.device) -> None:
        self.plan, self.group, self.device, self.rank = plan, group, device, group.rank()
        self.rounds = rank_rounds(plan, self.rank)
        self.sums_N = torch.zeros(len(plan.num_destinations_N), dtype=torch.int64, device=device)
        self.check = WeightsCheck(plan, shards, group)
        self._has_run = False

    @property
    def peak_bytes(self) -> int:
        """The most bytes of buffers that are in memory at the same time."""
        sizes = [(sum(round_.sent_bytes), sum(round_.received_bytes)) for round_ in self.rounds] + [(0, 0)]
        return max(
            received + following_sent + max(sent, following_received)
            for (sent, received), (following_sent, following_received) in pairwise(sizes)
        )

    @torch.no_grad()
    def run(self, params: Mapping[str, Tensor], rollout: vLLMRollout | None, version: int) -> None:
        """Collective over the group. RuntimeError on every rank, naming the tensors, when an engine has other bits.

        The digest of a shard is taken while it is written; after the first run all shards are read once more, so that
        two tensors that share memory by mistake are found.

        Args:
            params: this rank's training tensors under the training engine's names, empty where nothing is trained.
            rollout: this rank's engine with its weights awake, None where there is none.
        """
        values_of = partial(trained_values, params, agreed_scales(params, self.plan, self.group, self.device))
        self.sums_N.zero_()
        found = None
        if rollout is None:
            self._run_rounds(values_of, None)
        else:
            with rollout.update_weight_shards(version) as writer:
                self._run_rounds(values_of, writer)
            found = writer.digests if self._has_run else rollout.shard_digests()
        self.check.require_equal(self.sums_N, found)
        self._has_run = True

    def _run_rounds(self, values_of: ValuesOf, writer: ShardWriter | None) -> None:
        """Write everything that this rank's engine owns; a rank without an engine owns nothing."""
        work: dist.Work | None = None
        arriving = torch.empty(0, dtype=torch.uint8, device=self.device)
        for round_, following in zip((None, *self.rounds), (*self.rounds, None), strict=True):
            packed = None if following is None else self._pack(following, values_of)
            if work is not None:
                work.wait()
            work, sent = None, packed  # the memory of what has been sent is free from here on
            del packed
            arrived = arriving
            if following is not None and sent is not None:
                arriving = torch.empty(sum(following.received_bytes), dtype=torch.uint8, device=self.device)
                sizes = following.received_bytes, following.sent_bytes
                work = dist.all_to_all_single(arriving, sent, *sizes, group=self.group, async_op=True)
            if round_ is not None and writer is not None:
                self._write(round_, arrived, values_of, writer)
            assert writer is not None or round_ is None or not (round_.local or round_.received), self.rank
            del arrived

    def _pack(self, round_: Round, values_of: ValuesOf) -> Tensor:
        """uint8 [bytes to all ranks]; values that go to several ranks are read from the weights once."""
        bucket = torch.empty(sum(round_.sent_bytes), dtype=torch.uint8, device=self.device)
        first: dict[int, Tensor] = {}
        for transfer, offset in round_.sent:
            target = _part(bucket, transfer, offset)
            earlier = first.setdefault(id(transfer), target)
            if earlier is not target:
                target.copy_(earlier)
                continue
            # A rank that also keeps the values adds their digest when it writes these.
            total = None if self.rank in transfer.pairs.destinations_D else self._total(transfer)
            starts, dtype = tuple(start for start, _ in transfer.ranges), self.plan.tensors[transfer.hf_name].dtype
            copy_with_digests(
                transfer.hf_name, target, values_of(transfer), starts, of_values=total, of_values_dtype=dtype
            )
        return bucket

    def _write(self, round_: Round, bucket: Tensor, values_of: ValuesOf, writer: ShardWriter) -> None:
        for transfer in round_.local:
            writer.write(transfer.hf_name, transfer.ranges, values_of(transfer), self._total(transfer))
        for transfer, offset in round_.received:
            writer.write(transfer.hf_name, transfer.ranges, _part(bucket, transfer, offset))

    def _total(self, transfer: Transfer) -> Tensor | None:
        """The sum to which this rank adds the digest of the values; None where another source does."""
        return self.sums_N[transfer.rollout_shard] if transfer.digest_rank == self.rank else None


def _part(bucket: Tensor, transfer: Transfer, offset: int) -> Tensor:
    """The values of a transfer in the shape of its ranges, in the order of the trainer's memory."""
    shape = shape_of(transfer.ranges)
    stride = (1, shape[0]) if inner_dim(transfer.hf_name) == 0 else (*shape[1:], 1)
    return bucket.view(transfer.dtype).as_strided(shape, stride, offset // transfer.dtype.itemsize)
