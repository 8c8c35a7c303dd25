"""Drafts of the model's own prediction layer (DeepSeek-V3's multi-token prediction).

Letters: T tokens of a step, B sequences, S rows of the buffers, R sequences that get a token, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from vllm.distributed.parallel_state import StepExchange
from vllm.forward_context import ForwardContext
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.ops.contract import KVCache
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.decode_graphs import DecodeGraphs, Forward
from vllm.v1.worker.input_batch import NOWHERE, InputBatch, StepInputs, slots
from vllm.v1.worker.rank_context import RankContext
from vllm.v1.worker.step_context import ContextBuilder


class MtpProposer:
    """Runs the prediction layer behind a step: first over all of its tokens, each with the token that follows it, which
    fills the layer's cache and gives the first drafts; each further pass goes on from the drafts of the one before.

    The layer's cache lies in the model's blocks: an entry belongs to the position of its state, and is computed, shared
    and moved with it. It also depends on the token that follows; the last one of a shared block is its first owner's.
    Entries of drafts are overwritten when their positions are computed. A draft is drawn with the noise of its
    position, as the token will be.

    Where steps run no pass, entries are missing. Behind such a gap a sequence attends to nothing before it, and its
    entries lie from the beginning of a block on: keys have their positions in them, whatever their slots.
    """

    def __init__(
        self, rank: RankContext, model: CausalLM, batch: InputBatch, new_graphs: Callable[[Forward], DecodeGraphs]
    ) -> None:
        config = rank.config
        self._model, self._batch, self._block_size = model, batch, config.cache.block_size
        self._contexts = ContextBuilder(batch, rank.device)
        self._sampler = Sampler(config.model.hf.vocab_size, rank.ops, rank.device, config.logprobs_mode)
        self.graphs: DecodeGraphs | None = None
        if not config.compilation.enforce_eager:
            sizes, dtype = config.compilation.cudagraph_capture_sizes, getattr(torch, config.model.dtype)
            self._states_SH = torch.zeros(sizes[-1], config.model.hf.hidden_size, dtype=dtype, device=rank.device)
            self.graphs = new_graphs(self._captured)

    def propose(
        self,
        step: SchedulerOutput,
        inputs: StepInputs,
        rows: np.ndarray,
        computed: np.ndarray,
        states_TH: Tensor,
        exchange: StepExchange,
        caches: list[KVCache],
    ) -> dict[str, list[int]]:
        """Drafts by request, for those that have got a token in a step: at most one of each pass.

        rows, computed: int64, the batch's rows of the step's requests, and their tokens in the cache before it.
        """
        batch = self._batch
        if exchange.num_draft_passes == 0:
            batch.predicted_from[rows], batch.has_gaps = NOWHERE, True
            return {}
        batch.predicted_from[rows] = np.minimum(batch.predicted_from[rows], computed)
        following = self._with_next_tokens(inputs)
        states_TH = self._pass(following, states_TH, exchange.token_counts, exchange.is_decode_everywhere, caches)
        sampled = step.sampled
        drafting_R = np.array([batch.row_of[request.request_id] for request in sampled], dtype=np.int64)
        drafts: list[list[int]] = [[] for _ in sampled]
        last_R = _last_tokens(step, sampled, inputs)
        alive_R, states_BH = np.arange(len(sampled)), states_TH[self._contexts.send(last_R)]
        for index in range(exchange.num_draft_passes):
            if index:
                following, is_covered = self._next_positions(drafting_R[alive_R], index)
                alive_R, states_BH = alive_R[is_covered], states_BH[self._contexts.send(np.flatnonzero(is_covered))]
                states_BH = self._pass(following, states_BH, list(exchange.sampled_counts), True, caches)
            if len(alive_R) == 0:
                continue  # other replicas may have drafts
            rows_B = drafting_R[alive_R]
            lens_B = batch.num_tokens[rows_B] + index
            has_room = lens_B < batch.token_ids.shape[1]
            output = self._sampler(self._model.compute_logits(states_BH), batch, rows_B, lens_B)
            has_room &= output.token_ids >= 0  # NaN has none
            batch.token_ids[rows_B[has_room], lens_B[has_room]] = output.token_ids[has_room]
            for request, token in zip(alive_R[has_room].tolist(), output.token_ids[has_room].tolist(), strict=True):
                drafts[request].append(token)
            alive_R, states_BH = alive_R[has_room], states_BH[self._contexts.send(np.flatnonzero(has_room))]
        return {request.request_id: draft for request, draft in zip(sampled, drafts, strict=True) if draft}

    def _with_next_tokens(self, inputs: StepInputs) -> StepInputs:
        """The step with the tokens that follow its own."""
        batch = self._batch
        rows_T = np.repeat(inputs.rows_B, inputs.query_lens_B)
        after_T = np.minimum(inputs.positions_T + 1, batch.token_ids.shape[1] - 1)
        return self._from_gaps(replace(inputs, token_ids_T=batch.token_ids[rows_T, after_T]))

    def _next_positions(self, rows: np.ndarray, index: int) -> tuple[StepInputs, np.ndarray]:
        """The pass over the draft number ``index`` of each row, and which rows have a slot for that."""
        batch = self._batch
        positions = batch.num_tokens[rows] + index - 2
        places = positions - batch.predicted_from[rows] % self._block_size
        is_covered = places < batch.num_blocks[rows] * self._block_size
        rows, positions = rows[is_covered], positions[is_covered]
        following = StepInputs(
            token_ids_T=batch.token_ids[rows, positions + 1],
            positions_T=positions,
            slots_T=slots(batch, rows, places[is_covered]),
            rows_B=rows,
            query_lens_B=np.ones_like(rows),
            seq_lens_B=positions + 1,
            num_decode=len(rows),
            sampled_T=None,
            sampled_rows=rows,
            sampled_lens=positions + 1,
        )
        return self._from_gaps(following), is_covered

    def _from_gaps(self, inputs: StepInputs) -> StepInputs:
        """The step as the layer sees it: without what lies before the last gap of each sequence."""
        starts_B = self._batch.predicted_from[inputs.rows_B]
        if not starts_B.any():
            return inputs
        rows_T, offsets_T = (
            np.repeat(column, inputs.query_lens_B) for column in (inputs.rows_B, starts_B % self._block_size)
        )
        return replace(
            inputs,
            slots_T=slots(self._batch, rows_T, inputs.positions_T - offsets_T),
            seq_lens_B=inputs.seq_lens_B - starts_B,
            first_blocks_B=starts_B // self._block_size,
        )

    def _pass(
        self,
        inputs: StepInputs,
        states_TH: Tensor,
        dp_token_counts: list[int],
        is_decode_everywhere: bool,
        caches: list[KVCache],
    ) -> Tensor:
        """The layer's states [T, H] of a step's tokens; the next pass overwrites them."""
        if self.graphs is not None and is_decode_everywhere:
            size = self.graphs.size_for(max(dp_token_counts))
            if size is not None:
                self._states_SH[: len(states_TH)] = states_TH
                return self.graphs.run(inputs, self._batch.tables(inputs, slice(None)), size, caches)
        context = self._contexts.context(inputs, dp_token_counts)
        return self._model.predict(self._contexts.send(inputs.token_ids_T), states_TH, caches, context)

    def _captured(self, ids_S: Tensor, caches: list[KVCache], context: ForwardContext) -> Tensor:
        return self._model.predict(ids_S, self._states_SH[: context.num_tokens], caches, context)


def _last_tokens(step: SchedulerOutput, sampled: list[Request], inputs: StepInputs) -> np.ndarray:
    """int64 [R], the token of the step behind which each of its ``sampled`` sequences has got its last token."""
    lengths = np.array([1 + len(step.drafts.get(request.request_id, ())) for request in sampled], dtype=np.int64)
    last_R = np.cumsum(lengths) - lengths
    if step.num_sampled is not None:
        last_R += np.array(step.num_sampled, dtype=np.int64) - 1
    return last_R if inputs.sampled_T is None else inputs.sampled_T[last_R]
