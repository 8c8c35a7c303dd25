"""Router replay over a batch of rows: what the old log-prob pass (R2) or the rollout (R3) chose, by row, for any
packing.

Letters: B rows, L columns (prompt and response), M MoE layers of this rank, K experts of a token, T packed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from megatron.core.transformer.moe.router_replay import MicroBatchRouting, RouterReplay
from verl.protocol import DataProto
from verl.utils.megatron.packed_batch import PackedMicroBatch

ROW = "routing_row"  # column of update batches: the row of the traced batch, int64 [B]
FROM_ROLLOUT = "routed_experts"  # column of a generated batch: [B, L, MoE layers, K], any integer type


@dataclass(frozen=True)
class RoutingRows:
    """The experts of every real token of a batch, on the host, for the MoE layers of this pipeline stage.

    Attributes:
        choices_BLMK: uint8 or int32; zero where there is no token. 4096 tokens of 8 layers and 8 experts are 256 KB.
        layers: global number of each of the M layers.
        prints_B: fingerprint of each row's tokens, int64, to know the rows again.
        is_known_BL: bool, the tokens that have choices; None: all but padding.
    """

    choices_BLMK: Tensor
    layers: tuple[int, ...]
    prints_B: Tensor
    is_known_BL: Tensor | None = None

    @staticmethod
    def traced(
        replay: RouterReplay,
        micro_batches: Sequence[PackedMicroBatch],
        data: DataProto,
        groups: ProcessGroups,
        device: torch.device,
    ) -> RoutingRows:
        """Collects the traces of the micro-batches of ``data``; collective over tp and cp, on ``device``."""
        choices_BLMK: Tensor | None = None
        layers: tuple[int, ...] = ()
        num_rows, num_cols = data.batch["input_ids"].shape
        for micro in micro_batches:
            assert micro.packed_seq_params.routing is not None, "the pass was not traced"
            chosen = replay.choices(micro.packed_seq_params.routing)
            layers = tuple(chosen)
            if choices_BLMK is None:
                num_experts_of_token = next(iter(chosen.values())).shape[1] if chosen else 0
                shape = (num_rows, num_cols, len(chosen), num_experts_of_token)
                choices_BLMK = torch.zeros(shape, dtype=replay.dtype)
            own_N = ~micro.token_is_kept_N  # one rank and sequence for each token, since those of ranks are summed
            rows, cols, places = (
                part[own_N] for part in (micro.token_rows_N, micro.token_cols_N, micro.token_positions_N)
            )
            for index, layer in enumerate(layers):
                choices_BLMK[rows, cols, index] = chosen[layer].cpu()[places]
        assert choices_BLMK is not None, "a pass has at least one micro-batch"
        _sum_over_context_parts(choices_BLMK, groups, device)
        return RoutingRows(choices_BLMK, layers, _fingerprints(data))

    @staticmethod
    def from_rollout(data: DataProto, layers: Sequence[int], all_layers: Sequence[int]) -> RoutingRows:
        """What the rollout chose for ``data``: of the MoE layers ``all_layers`` those of this stage, ``layers``.

        The column has all of them, or was fetched for this stage and has its own. The last token of a row, and before a
        new row of the same sample, was never an input of the rollout, so nothing is known of it.
        """
        if FROM_ROLLOUT not in data.batch:
            raise ValueError(
                f"router replay R3: the batch has no column {FROM_ROLLOUT!r}; set "
                "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
            )
        choices_BLMK = data.batch[FROM_ROLLOUT]
        if choices_BLMK.size(2) == len(all_layers):
            choices_BLMK = choices_BLMK[:, :, [all_layers.index(layer) for layer in layers]]
        elif choices_BLMK.size(2) != len(layers):
            raise ValueError(
                f"router replay R3: the rollout has {choices_BLMK.size(2)} MoE layers, the actor {len(all_layers)}"
            )
        is_real_BL = data.batch["attention_mask"].bool()
        columns_L = torch.arange(is_real_BL.size(1))
        last_B1 = torch.where(is_real_BL, columns_L, -1).amax(-1, keepdim=True)
        is_known_BL = is_real_BL & (columns_L < last_B1)
        if "row_starts" in data.batch:
            rows, starts = data.batch["row_starts"].nonzero(as_tuple=True)
            is_known_BL[rows, starts + is_real_BL.size(1) - data.batch["row_starts"].size(1) - 1] = False
        return RoutingRows(choices_BLMK, tuple(layers), _fingerprints(data), is_known_BL)

    def check(self, data: DataProto) -> None:
        """Raises ValueError unless ``data`` has the traced rows in their order."""
        prints_B = _fingerprints(data)
        if not torch.equal(prints_B, self.prints_B):
            raise ValueError(
                f"router replay: the update has {len(prints_B)} rows, and the old log-prob pass traced "
                f"{len(self.prints_B)}; both must get the same rows in the same order"
            )

    def replayed(self, replay: RouterReplay, micro: PackedMicroBatch, data: DataProto) -> MicroBatchRouting:
        """The choices of the tokens of ``micro``, which was packed from ``data``; padding is routed by the gate."""
        rows = data.batch[ROW][micro.token_rows_N]
        cols, places = micro.token_cols_N, micro.token_positions_N
        is_known_T = torch.zeros(micro.num_tokens, dtype=torch.bool)
        is_known_T[places] = True if self.is_known_BL is None else self.is_known_BL[rows, cols]
        choices = {}
        for index, layer in enumerate(self.layers):
            choices[layer] = self.choices_BLMK.new_zeros(micro.num_tokens, self.choices_BLMK.size(-1))
            choices[layer][places] = self.choices_BLMK[rows, cols, index]
        return replay.replay(choices, is_known_T)


def with_row_numbers(data: DataProto) -> DataProto:
    """``data`` with the column ``ROW`` in place of the choices, so that mini-batches find their rows again."""
    numbers = torch.arange(len(data))
    columns = {name: column for name, column in data.batch.items() if name != FROM_ROLLOUT}
    return DataProto.from_dict({**columns, ROW: numbers}, data.non_tensor_batch, data.meta_info)


def _fingerprints(data: DataProto) -> Tensor:
    ids_BL = data.batch["input_ids"] * data.batch["attention_mask"]
    generator = torch.Generator().manual_seed(0)
    return (ids_BL * torch.randint(1, 1 << 40, (ids_BL.size(1),), generator=generator)).sum(-1)


def _sum_over_context_parts(choices_BLMK: Tensor, groups: ProcessGroups, device: torch.device) -> None:
    """Sums over context-parallel ranks, layer by layer in int32: one rank traced a token, the others have zeros."""
    if groups.cp.size() == 1:
        return
    for index in range(choices_BLMK.size(2)):
        of_layer = choices_BLMK[:, :, index].to(device, torch.int32)
        dist.all_reduce(of_layer, group=groups.cp)
        choices_BLMK[:, :, index] = of_layer.to(choices_BLMK.dtype)
