"""The device ops that the rollout engine calls: a table of callables. The plain-torch reference specifies each of them.

Letters: T tokens, B sequences, H hidden size, N heads of this rank, P / R channels of a query head without / with
position, L KV latent, D = L + R cached channels, V value channels of a head, E experts of this rank, K experts per
token, F expert width, W vocabulary, I inputs and O outputs of a product. In the gqa entries G is the number of key and
value heads and D the number of channels of a head.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vllm.config import LOGPROBS_MODES, VllmConfig
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.ops.weights import Fp8Operand, NewWeight, PackedWeight, block_scales_of, dense, new_plain_weight

KVCache: TypeAlias = tuple[Tensor, ...]
"""One layer's paged cache in the layout of the op table that made it: each tensor is [num_blocks, ...]."""


@dataclass
class DecodeMetadata:
    """The sequences of a step that have exactly one new token; they come first among the step's tokens."""

    seq_lens_host: np.ndarray  # int64 [B], tokens in the cache, the new one included
    seq_lens: Tensor  # int32 [B], the same on the device
    block_tables: Tensor  # int32 [B, max_blocks], entries past a sequence's last block hold any valid block id
    block_size: int
    scratch: dict[str, Any] = field(default_factory=dict)  # what an op derives from the metadata, for the other layers
    # A list while the step is captured as a graph, else None. Every replay uses the same metadata with new contents. An
    # op whose captured work holds a host value appends a function that updates this value from seq_lens_host; the
    # engine launches each replay and then calls all of them, so the captured work waits for its update.
    renewals: list[Callable[[], None]] | None = None

    def as_prefill(self) -> PrefillMetadata:
        """The same sequences as a prefill of one token each; built once for all layers."""
        prefill: PrefillMetadata | None = self.scratch.get("as_prefill")
        if prefill is None:
            cu_query_lens = torch.arange(len(self.seq_lens_host) + 1, dtype=torch.int32, device=self.seq_lens.device)
            lens, on_device = self.seq_lens_host, (cu_query_lens, self.seq_lens, self.block_tables)
            prefill = PrefillMetadata(np.ones_like(lens), lens, *on_device, self.block_size)
            self.scratch["as_prefill"] = prefill
        return prefill


@dataclass
class PrefillMetadata:
    """The sequences of a step that have several new tokens (a prompt, or the next chunk of one)."""

    query_lens_host: np.ndarray  # int64 [B], new tokens of each sequence
    seq_lens_host: np.ndarray  # int64 [B], tokens in the cache, the new ones included
    cu_query_lens: Tensor  # int32 [B+1], exclusive prefix sums of the query lengths
    seq_lens: Tensor  # int32 [B]
    block_tables: Tensor  # int32 [B, max_blocks]
    block_size: int
    scratch: dict[str, Any] = field(default_factory=dict)

    def as_queries(self) -> tuple[Tensor, np.ndarray]:
        """The block table of each new token, int32 [T, max_blocks], and how many tokens it sees, int64 [T]."""
        lens = self.query_lens_host
        starts, before = np.cumsum(lens) - lens, self.seq_lens_host - lens
        row_T = np.repeat(np.arange(len(lens)), lens)
        visible_T = (before - starts)[row_T] + np.arange(len(row_T), dtype=np.int64) + 1
        return self.block_tables.index_select(0, torch.from_numpy(row_T).to(self.block_tables.device)), visible_T


Angles: TypeAlias = tuple[Tensor, Tensor]
"""cos and sin of the angles at each token's position, fp32 [T, R] each; the second half of R repeats the first."""

Queries: TypeAlias = tuple[Tensor, Tensor]
"""Queries of latent attention: their channels without position, [T, N, P] or in latent space [T, N, L], and those with
position, [T, N, R].
"""

Choices: TypeAlias = tuple[Tensor, Tensor]
"""Each token's experts: their weights, fp32 [T, K], and their ids, int64 [T, K]."""

ExpertMatrices: TypeAlias = tuple[Any, Any]
"""w13 [E, 2F, H] and w2 [E, H, F] of the experts of a rank, weights of the table that takes them."""

FusedExperts: TypeAlias = Callable[[Tensor, ExpertMatrices, Choices, int], Tensor]
"""See `RolloutOps.fused_experts`."""


class RouterSettings(NamedTuple):
    """How a token chooses its experts, see `RolloutOps.topk_router`."""

    top_k: int
    num_groups: int
    topk_groups: int
    normalize: bool
    scaling: float
    scoring: str  # "sigmoid" or "softmax"


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of each head of queries and of keys, with the weights of one head."""

    q_weight_D: Tensor
    k_weight_D: Tensor
    eps: float


@dataclass
class LogitEdits:
    """Changes of single logits before the temperature: first the bias, then the penalties.

    M logits get a bias, S logits penalties. An index is row * W + token, int64; a list names no index twice.
    """

    bias_at_M: Tensor | None = None
    bias_M: Tensor | None = None  # fp32, added
    seen_at_S: Tensor | None = None  # the tokens of each row's prompt and output
    repetition_S: Tensor | None = None  # fp32, divides a positive logit and multiplies any other
    penalty_S: Tensor | None = None  # fp32, then subtracted: frequency_penalty * count in the output + presence_penalty


@dataclass
class SamplingBatch:
    """The sampling settings of each of B rows."""

    temperature_B: Tensor  # fp32, 0 = greedy
    keys_B2: Tensor  # int32, noise keys of (request seed, token position); see vllm/v1/sample/rng.py
    vocab_keys_W: Tensor  # int32, noise keys of the vocabulary
    top_k_B: Tensor | None  # int32 in [1, W], None when no row limits it
    top_p_B: Tensor | None  # fp32 in (0, 1], None when no row limits it
    banned_BW: Tensor | None  # bool, tokens that must not be drawn, never all of a row; None when there are none
    has_greedy: bool
    has_random: bool
    max_top_k: int = 0  # largest value of top_k_B, known on the host; 0 without
    num_top_logprobs: int = 0  # how many of the most likely tokens to report besides the sampled one
    min_p_B: Tensor | None = None  # fp32 in [0, 1], None when no row limits it
    edits: LogitEdits | None = None  # None when no row has any
    logprobs_mode: str = LOGPROBS_MODES[0]

    @property
    def is_plain(self) -> bool:
        """Whether tokens are drawn from softmax(logits / temperature) and log-probs are those of this distribution."""
        limits = (self.top_k_B, self.top_p_B, self.min_p_B, self.banned_BW, self.edits)
        return all(limit is None for limit in limits) and self.logprobs_mode == LOGPROBS_MODES[0]


NOT_FINITE = -1


@dataclass
class SampledTokens:
    """Result of `RolloutOps.sample` for B rows."""

    # int64; NOT_FINITE where a given logit is NaN or infinite: one transfer brings both to the host
    token_ids_B: Tensor
    # fp32, the token's, by the batch's logprobs_mode; a greedy row counts as temperature 1. NaN where the logits are
    # not finite, as given or after the row's own edits and temperature.
    logprobs_B: Tensor
    ranks_B: Tensor | None = None  # int64, 1 = the most likely; only with num_top_logprobs > 0
    top_ids_BK: Tensor | None = None  # int64
    top_logprobs_BK: Tensor | None = None  # fp32, -inf for tokens that processed_logprobs excludes


RunBeside: TypeAlias = Callable[[Callable[[], Any]], Callable[[], Any]]
"""Starts work that nothing needs before its result is asked for; what follows may run at the same time.

It returns the function that waits for the work and returns its result, to be called once. Until that call the caller
keeps what the work reads, and writes nothing of it.
"""


def run_at_once(work: Callable[[], Any]) -> Callable[[], Any]:
    """The `RunBeside` that finishes the work before it returns."""
    result = work()
    return lambda: result


def run_when_asked(work: Callable[[], Any]) -> Callable[[], Any]:
    """The `RunBeside` that does the work when its result is asked for."""
    return work


def no_problems(config: VllmConfig) -> list[str]:
    """The `RolloutOps.problems` of a table that takes every configuration."""
    return []


def takes_no_fp8(weight: Tensor) -> bool:
    """The `RolloutOps.takes_fp8` of a table without FP8 products."""
    return False


def add_layer_at_once(x_TH: Tensor, layer: Callable[[Tensor], Tensor], given_TH: Tensor) -> Tensor:
    """The `RolloutOps.add_layer` that runs all rows at once."""
    return layer(given_TH).add_(x_TH)


@dataclass(frozen=True)
class RolloutOps:
    """A complete op table. Outputs have the dtype of the first tensor unless stated.

    A tolerance is the largest difference from the reference, relative to its largest value. Where an entry names none
    for a dtype it is 1e-5 (fp32) and 1e-2 (bf16); integers are equal. tests/vllm/test_cuda_ops.py, test_cpu_ops.py and
    tests/npu/rollout_op_cases.py hold the tables to it; the latter two allow 2e-2 in bf16 to some entries.

    Entries that a decode step runs are captured in its graph unless `not_capturable` names them; they read nothing back
    from the device. Never captured: new_kv_cache, new_gqa_cache, mla_prefill (but where mla_decode is None),
    gqa_prefill and sample.

    A weight is what the table's `new_weight` made, a `PackedWeight` or a tensor, or any other tensor; linear,
    fused_experts and exchanged_experts are given its `operand`.

    new_kv_cache(num_blocks, block_size, L, R, dtype, device, layout) -> KVCache
        One layer's cache, finite everywhere (masked positions are multiplied by zero, so garbage must not be NaN).
        layout: "nd", or another of the platform's supported_kv_layouts; the other ops recognise it by the shapes.
        Reference: one tensor [num_blocks, block_size, L+R], latent then rope channels.
    linear(x_TI, weight_OI) -> [T, O]
        x weight^T, in the dtype of the weight: x of another one is converted first. x may be a slice of columns; a
        tensor's memory is [O, I] or [I, O]; the parts of a packed weight are stacked along O. T may be 0. 1e-5 (fp32),
        1e-2 (bf16).
    head_linear(x_TNI, weight_NIO) -> [T, N, O]
        out[t, n] = x[t, n] weight[n], with one matrix per head. x may be a slice of channels; the memory of each
        weight[n] is [I, O] or [O, I]. Tolerance of linear.
    rms_norm(x_TH, weight_H, eps) -> [T, H]
        x / sqrt(mean(x^2) + eps) * weight, the mean in fp32. x may be a strided slice of columns. 1e-6 (fp32), 1e-2
        (bf16).
    add_rms_norm(x_TH, residual_TH, weight_H, eps) -> (normed [T, H], sum [T, H])
        sum = x + residual, normed = rms_norm(sum, weight, eps). x may be overwritten. 1e-6 (fp32), 1e-2 (bf16).
    rotary_interleaved(x_TNR, angles: Angles) -> [T, N, R]
        Rotates the pairs (x[2i], x[2i+1]) by angle i; the output holds all first members, then all second members:
        out[i] = x[2i] cos[i] - x[2i+1] sin[i]; out[R/2+i] = x[2i+1] cos[i] + x[2i] sin[i]. x may be strided. 1e-6
        (fp32).
    norm_rope_write_kv(cache, kv_TD, weight_L, eps, angles: Angles, slots_T) -> None
        Writes rms_norm(kv[t, :L], weight, eps), then rotary_interleaved of kv[t, L:], to the cache's slot slots_T[t] =
        block * block_size + offset (int64, no slot twice). kv may be a strided slice of columns. Tolerances of the two.
    mla_decode((q_latent_BNL, q_rope_BNR): Queries, cache, meta: DecodeMetadata, scale) -> out_BNL
        Absorbed form: the sum of latent_s over the sequence, weighted by softmax(scale * (q_latent . latent_s +
        q_rope . rope_s)). 1e-5 (fp32). None: a decode step uses mla_prefill.
    mla_prefill((q_nope_TNP, q_rope_TNR): Queries, kv_b_NCL, cache, meta: PrefillMetadata, scale) -> out_TNV
        Causal attention of packed new tokens over each sequence's whole cached context, in which the new tokens are
        already written. kv_b_NCL, C = P + V, expands a latent into the keys (first P) and values of each head. 1e-5
        (fp32).
    new_gqa_cache(num_blocks, block_size, G, D, dtype, device) -> KVCache
        One layer's cache of keys and values, finite everywhere. Reference: [num_blocks, block_size, 2, G, D].
    rope_write_gqa(cache, qkv_TMD, bias_MD | None, norms: HeadNorms | None, angles: Angles, slots_T) -> q_TND
        The M = N + 2 G heads of qkv are N of queries, then G of keys, then G of values. The bias is added and rms_norm
        applied to each head of queries and keys, then their channels (i, i + R/2) are rotated by angle i, where R <= D
        are the first channels of a head and the others stay: out[i] = x[i] cos[i] - x[i+R/2] sin[i]; out[i+R/2] =
        x[i+R/2] cos[i] + x[i] sin[i]. Keys and values are written to the tokens' slots as in norm_rope_write_kv; the
        queries are returned. 1e-6 (fp32), 1e-2 (bf16).
    gqa_decode(q_BND, cache, meta: DecodeMetadata, scale) -> [B, N, D]
        The sum of v_s over the sequence, weighted by softmax(scale * q . k_s); query head n reads head n // (N / G).
        1e-5 (fp32).
    gqa_prefill(q_TND, cache, meta: PrefillMetadata, scale) -> [T, N, D]
        The same, causal, of packed new tokens over each sequence's whole cached context. 1e-5 (fp32).
    topk_router(logits_TE fp32, bias_E fp32 | None, routing: RouterSettings) -> choices: Choices
        scoring "sigmoid" (DeepSeek-V3, arXiv:2412.19437 eq. 12-16): scores = sigmoid(logits); scores + bias only
        select: the groups with the largest sum of their two best experts, then the top_k experts of those groups.
        "softmax" (DeepSeek-V2, arXiv:2405.04434 sec. 2.1.2): scores = softmax(logits), a group is ranked by its best
        expert. weights = scores of the chosen experts, divided by their sum (+1e-20) if normalize, times scaling. bias
        None is 0. The order of the K choices is free. T may be 0.
    fused_experts(x_TH, matrices: ExpertMatrices, choices: Choices, first_expert) -> [T, H]
        With w13, w2 = matrices and weights, ids = choices: sum_k weights[t,k] * w2[e] silu_and_mul(w13[e] x[t]) over
        the chosen experts that this rank holds, e = ids[t,k] - first_expert in [0, E); the other ranks' experts add
        nothing. w13 holds gate rows, then up rows: a packed one has two parts. T may be 0.
    exchanged_experts(x_TH, matrices: ExpertMatrices, choices: Choices, num_active, group) -> [T, H]
        fused_experts over the experts of all ranks of the group: each token is sent to the ranks that hold its chosen
        experts and its results are sent back. Rank r of the group holds experts [r E, (r + 1) E). Collective: every
        rank calls it with the same T >= 1 and its own num_active in [0, T]; rows from num_active on are padding, which
        is not sent and whose results may be anything finite. Only this entry uses the group. Tolerance of
        fused_experts; any layout equals one process.
    silu_and_mul(x_T2F) -> [T, F]
        silu(x[:, :F]) * x[:, F:].
    sample(logits_BW fp32, batch: SamplingBatch) -> SampledTokens
        Edits first, in the order of LogitEdits; banned tokens have weight 0. Greedy rows: argmax. Others: a draw from
        softmax(logits / temperature) after min-p (drops tokens less likely than min_p times the best one), then top-k
        (keeps tokens as likely as the k-th), then top-p (keeps the smallest set of most likely tokens that reaches
        top_p; among equals the last of the vocabulary first), each renormalised. The draw is the exponential race of
        vllm/v1/sample/rng.py, so a row's token depends only on its logits and keys. logits are not changed. A row whose
        logits are not all finite, before edits and bans, gets NOT_FINITE and NaN; the host does not wait for that.
    implementations: native, reference or exact for each entry, or which part is which; logged once at start.
    """

    new_kv_cache: Callable[[int, int, int, int, torch.dtype, torch.device, str], KVCache]
    # `Weight` stands as Any: an implementation takes the weights of its own table.
    linear: Callable[[Tensor, Any], Tensor]
    head_linear: Callable[[Tensor, Tensor], Tensor]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotary_interleaved: Callable[[Tensor, Angles], Tensor]
    norm_rope_write_kv: Callable[[KVCache, Tensor, Tensor, float, Angles, Tensor], None]
    mla_decode: Callable[[Queries, KVCache, DecodeMetadata, float], Tensor] | None
    mla_prefill: Callable[[Queries, Tensor, KVCache, PrefillMetadata, float], Tensor]
    new_gqa_cache: Callable[[int, int, int, int, torch.dtype, torch.device], KVCache]
    rope_write_gqa: Callable[[KVCache, Tensor, Tensor | None, HeadNorms | None, Angles, Tensor], Tensor]
    gqa_decode: Callable[[Tensor, KVCache, DecodeMetadata, float], Tensor]
    gqa_prefill: Callable[[Tensor, KVCache, PrefillMetadata, float], Tensor]
    topk_router: Callable[[Tensor, Tensor | None, RouterSettings], Choices]
    fused_experts: FusedExperts
    exchanged_experts: Callable[[Tensor, ExpertMatrices, Choices, int, GroupCoordinator], Tensor]
    silu_and_mul: Callable[[Tensor], Tensor]
    sample: Callable[[Tensor, SamplingBatch], SampledTokens]
    implementations: dict[str, str]
    # Entries of a decode step that read the device or whose work depends on host values: a step with them cannot be
    # captured as a device graph.
    not_capturable: tuple[str, ...] = ()
    # Whether gqa_prefill gives a token the same bits as gqa_decode, and mla_prefill as head_linear, mla_decode and
    # head_linear: the engine may then compute the last token of a prompt as a decode step.
    prefill_equals_decode: bool = False
    # Whether head_linear's kernel copies a weight whose matrices do not lie one after another: the engine then keeps
    # what it multiplies with in that form too (`WeightCopies`), as it does where that weight is held in FP8 and the
    # others are multiplied in it.
    copies_strided_weights: bool = False
    new_weight: NewWeight = new_plain_weight
    # embedding(ids_T, weight) -> [T, I], rows of a weight that `new_weight` made with `by_row`.
    embedding: Callable[[Tensor, Any], Tensor] = F.embedding
    # as_float32(x) -> x in fp32, itself where it is. Logits are the largest tensors of a step.
    as_float32: Callable[[Tensor], Tensor] = Tensor.float
    # None: the device does one thing after the other.
    run_beside: RunBeside | None = None
    # add_layer(x, layer, given) -> x + layer(given), for a layer that treats each row alone; x may be overwritten.
    add_layer: Callable[[Tensor, Callable[[Tensor], Tensor], Tensor], Tensor] = add_layer_at_once
    # problems(config) -> what of a configuration the table's kernels do not take, one sentence each.
    problems: Callable[[VllmConfig], list[str]] = no_problems
    # connect_exchange(config, group): make what exchanged_experts sends through, before the cache is sized; every rank
    # of the group calls it once. None: collectives of the group suffice.
    connect_exchange: Callable[[VllmConfig, GroupCoordinator], None] | None = None
    # takes_fp8(weight) -> whether the table multiplies a weight held in FP8 blocks with FP8 activations, as
    # vllm/ops/reference_fp8.py does, 1e-5 (fp32), 1e-2 (bf16). All others are dequantised for each product.
    takes_fp8: Callable[[Tensor], bool] = takes_no_fp8

    def __post_init__(self) -> None:
        if set(self.implementations) != self.entries():
            raise ValueError(
                f"implementations of an op table must be native or reference for each of {sorted(self.entries())}, "
                f"got {self.implementations}"
            )

    @property
    def multiplies_fp8(self) -> bool:
        """Whether the table has FP8 products at all."""
        return self.takes_fp8 is not takes_no_fp8

    def operand(self, weight: Tensor | PackedWeight) -> Any:
        """Return what the table's products take of a weight."""
        scales = block_scales_of(weight)
        if scales is None or not isinstance(weight, Tensor) or not self.takes_fp8(weight):
            return dense(weight)
        return Fp8Operand(weight.data, scales)

    @classmethod
    def entries(cls) -> set[str]:
        """Names of the ops: the fields before `implementations`."""
        names = [field.name for field in fields(cls)]
        return set(names[: names.index("implementations")])


def entries_of(*owners: object) -> dict[str, Any]:
    """Name -> the entry of a table that is a method of one of `owners`."""
    names = RolloutOps.entries()
    return {name: getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


_PROVIDER = "'module:function', e.g. 'vllm.ops.reference:rollout_ops'"


def resolve(provider: str) -> RolloutOps:
    """Return the op table that `provider` makes, a dotted "module:function" (e.g. "vllm_ascend.ops:rollout_ops")."""
    try:
        function = pkgutil.resolve_name(provider)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"rollout_ops={provider!r} cannot be loaded: {error}; expected {_PROVIDER}") from error
    table = function() if callable(function) else function
    if not isinstance(table, RolloutOps):
        raise ValueError(f"rollout_ops={provider!r} is {type(table).__name__}, expected RolloutOps from {_PROVIDER}")
    return table
