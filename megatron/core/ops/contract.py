"""The table of device ops that the training engine calls; a device package supplies its own entries.

Letters: T tokens, H hidden, N heads, D head size, R rotary size, F expert width, E experts, K experts of a token,
B packed sequences, V vocabulary. Every op is differentiable in its floating-point inputs, but for ``matmul``,
``adamw_step``, the ``attention_block`` pair, ``log_sum_exp`` and ``cross_entropy_grad``. "Tolerance" is the largest
difference from ``reference.py``, relative to the largest output: 1e-6 in float32, 1e-2 in bfloat16 unless an op says
more.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from megatron.core.packed_seq_params import SharedPrompts


class RmsNorm(Protocol):
    """x [..., D], weight [D] -> [..., D] in x's dtype: ``x / sqrt(mean(x^2) + eps) * weight``, mean in float32."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...


class Swiglu(Protocol):
    """x [T, 2F] = (gate | up) -> [T, F]: ``silu(gate) * up`` (arXiv 2002.05202)."""

    def __call__(self, x: Tensor) -> Tensor: ...


class RotaryInterleaved(Protocol):
    """x_TNR, cos and sin [T, R/2] float32 -> [T, N, R] in x's dtype, computed in float32.

    Rotates every pair: ``y[2i] = x[2i] cos[i] - x[2i+1] sin[i]``, ``y[2i+1] = x[2i] sin[i] + x[2i+1] cos[i]``. An
    implementation may permute R in the output, in the same way for every input: only products of queries with keys
    are used.
    """

    def __call__(self, x_TNR: Tensor, cos: Tensor, sin: Tensor) -> Tensor: ...


class CoreAttention(Protocol):
    """q [T, N, Dq], k [T, M, Dq], v [T, M, Dv], cu_seqlens int32 [B+1] (host or device) -> [T, N, Dv].

    ``softmax(q k^T * scale) v`` inside each sequence, with ``causal`` only over earlier tokens and the token itself.
    Dq and Dv may differ. M divides N: N/M neighbouring query heads share a head of k and v. Tolerance 1e-5 in float32.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, causal: bool = True
    ) -> Tensor: ...


class SharedPromptAttention(Protocol):
    """``CoreAttention``, causal, of sequences of which some begin with the same tokens, which q, k and v have once.

    q [T, N, Dq], k [T, M, Dq], v [T, M, Dv] -> [T, N, Dv]. cu_seqlens and max_seqlen are those of whole sequences;
    ``shared`` says where their tokens are.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, shared: SharedPrompts
    ) -> Tensor: ...


Bounds = tuple[Tensor, Tensor]  # of the queries, of the keys
Attended = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # q, k, v, and out and lse of the queries


class AttentionBlock(Protocol):
    """Attention to some of a sequence's keys: q [Tq, N, Dq], k [Tk, M, Dq], v [Tk, M, Dv] -> (out, lse).

    bounds: those of the same B sequences in q and in k, int32 [B+1] each (host or device). out [Tq, N, Dv]:
    ``softmax(q k^T * scale) v``; lse float32 [Tq, N]: the logarithm of the softmax's denominator, which is what it
    takes to join the outputs for several sets of keys. ``causal``: a sequence's last query sees all of its keys, the
    one before all but the last, and so on; no sequence then has more queries than keys. Sequences without queries or
    keys are not allowed. No gradient: see ``AttentionBlockGrad``. Tolerance as ``CoreAttention``.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, scale: float, causal: bool = True
    ) -> tuple[Tensor, Tensor]: ...


class AttentionBlockGrad(Protocol):
    """Gradients of q, k and v that go through these keys; ``attended``'s out and lse are those of all keys together.

    grad_out and out [Tq, N, Dv], lse float32 [Tq, N], the others as in ``AttentionBlock``. With the weights
    ``p = exp(q k^T * scale - lse)``: ``dv = p^T grad_out``, ``ds = p * (grad_out v^T - sum(grad_out * out)) * scale``,
    ``dq = ds k``, ``dk = ds^T q``, each in the dtype of its tensor. q's gradient is the sum of dq over all sets.
    """

    def __call__(
        self, grad_out: Tensor, attended: Attended, bounds: Bounds, scale: float, causal: bool = True
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Matmul(Protocol):
    """a [M, K], b [K, N] (any strides) -> ``a @ b`` [M, N] in their dtype, added up in float32 or better.

    No gradient: layers multiply again for theirs.
    """

    def __call__(self, a: Tensor, b: Tensor) -> Tensor: ...


class TensorParallelOverlap(Protocol):
    """Products of sequence parallelism together with their collectives, parts of the one beside parts of the other.

    x [T/TP, K] or [T, K], w [K, N] (any strides), T the same on all ranks of ``group``, which all make the same calls.
    No gradient: layers multiply again for theirs. Tolerance: ``Matmul``'s, and that of another order of the ranks.
    """

    def prepare(self, group: dist.ProcessGroup) -> None:
        """Collective, before the group's first product; ValueError when its ranks cannot do this."""

    def all_gather_matmul(self, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """x [T/TP, K] -> (all ranks' x [T, K] in rank order, its ``x @ w`` [T, N])."""
        ...

    def matmul_reduce_scatter(self, x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
        """x [T, K] -> [T/TP, N]: this rank's rows of the ranks' sum of ``x @ w``."""
        ...


class LinearProducts(Protocol):
    """The three products of a linear layer ``y = x w^T``: x [T, K], w [N, K], y and its gradient [T, N].

    No gradient: layers multiply again for theirs. All results are in x's dtype.
    """

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """``x w^T`` [T, N]."""
        ...

    def dgrad(self, grad: Tensor, w: Tensor) -> Tensor:
        """``grad w`` [T, K]."""
        ...

    def wgrad(self, grad: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """``grad^T x`` [N, K], of which w may take the values as in ``GroupedMatmul``."""
        ...


class GroupedMatmul(Protocol):
    """x [T, K], w [E, K, N], tokens_per_expert int64 [E] (host or device, sum T) -> [T, N].

    Row t, which lies in expert e's run of rows, gives ``x[t] @ w[e]``. An expert without rows is allowed and gets a
    zero gradient. When w has a ``main_grad``, backward may add w's gradient to it; it then sets
    ``w.grad_added_to_main_grad``, and the gradient that it returns for w has a shape and no values.
    """

    def __call__(self, x: Tensor, w: Tensor, tokens_per_expert: Tensor) -> Tensor: ...


class TokenPermute(Protocol):
    """tokens_TH, indices_TK int64 -> (rows [T*K, H], row_map).

    One row per (token, choice), sorted by expert index and stable in the token order. ``row_map`` is opaque: it is only
    good for ``token_unpermute`` of the same table.
    """

    def __call__(self, tokens_TH: Tensor, indices_TK: Tensor) -> tuple[Tensor, Tensor]: ...


class TokenUnpermute(Protocol):
    """rows [T*K, H], row_map, probs_TK float32 (None: every weight is 1) -> [T, H] in the rows' dtype.

    ``out[t] = sum_k probs[t, k] * row of (t, k)``, summed in float32.
    """

    def __call__(self, rows: Tensor, row_map: Tensor, probs_TK: Tensor | None = None, topk: int = 1) -> Tensor: ...


@dataclass(frozen=True)
class RouterRule:
    """How a router picks ``topk`` experts for each token and weights them; ``TopkRouter`` says what the fields do."""

    topk: int
    num_groups: int | None = None
    group_topk: int | None = None
    score_function: str = "softmax"
    pre_softmax: bool = False
    norm_topk_prob: bool = True
    scaling_factor: float | None = None


class TopkRouter(Protocol):
    """logits_TE float32 -> (probs_TK float32, indices_TK int64): the K experts of each token and their weights.

    sigmoid (DeepSeek-V3, arXiv 2412.19437, eq. 12-16): ``s = sigmoid(logits)``; the choice is made on ``s +
    expert_bias``; with groups only experts of the ``group_topk`` groups with the highest sum of their two best biased
    scores can be chosen; weights are the unbiased s, with ``norm_topk_prob`` divided by their sum + 1e-20.
    softmax: ``pre_softmax`` picks from ``softmax(logits)`` and keeps those weights, otherwise weights are the softmax
    over the K picked logits; a group counts by its best expert (with ``pre_softmax`` this is DeepSeek-V2's
    group_limited_greedy, arXiv 2405.04434). Last, weights are multiplied by ``scaling_factor``.
    ``chosen_TK`` int64: these experts are taken, whatever would have been picked, and are returned as they are.
    The order of the K choices is free; indices and bias carry no gradient.
    """

    def __call__(
        self, logits_TE: Tensor, rule: RouterRule, expert_bias: Tensor | None = None, chosen_TK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...


class LogSumExp(Protocol):
    """logits_TV -> (lse_T, mean_T) float32: ``log sum_v exp(l_v)``; mean of l_v under the softmax, None when unwanted.

    No gradient: see ``CrossEntropyGrad``.
    """

    def __call__(self, logits_TV: Tensor, with_mean: bool = False) -> tuple[Tensor, Tensor | None]: ...


class CrossEntropyGrad(Protocol):
    """logits_TV, lse_T float32, target_T int64, grad_T float32 -> [T, V] in the logits' dtype.

    ``(exp(l_v - lse) - [v = target]) grad``; a target of -1 is none of these columns (another rank has it).
    """

    def __call__(self, logits_TV: Tensor, lse_T: Tensor, target_T: Tensor, grad_T: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class AdamwSettings:
    """The numbers of one AdamW step, as in ``AdamwStep``'s formula; ``step`` counts from 1, ``wd`` is weight_decay."""

    step: int
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_scale: float = 1.0


class AdamwStep(Protocol):
    """One AdamW step (arXiv 1711.05101) in place on flat tensors of one length.

    ``g = grad_scale grad``; ``p *= 1 - lr wd``; ``m = b1 m + (1-b1) g``; ``v = b2 v + (1-b2) g^2``;
    ``p -= lr m/(1-b1^step) / (sqrt(v/(1-b2^step)) + eps)``; ``weight = p``.

    param is float32; grad, exp_avg and exp_avg_sq are stored in float32 or bfloat16 and computed in float32; weight,
    the model's own copy of param, is of any float dtype (None: there is none). grad's values are lost.
    """

    def __call__(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        how: AdamwSettings,
        weight: Tensor | None = None,
    ) -> None: ...


@dataclass(frozen=True)
class TrainOps:
    """One implementation per op; ``names`` says for each whether it is 'native', 'reference' or 'exact'.

    shared_prompt_attention None: ``core_attention`` gets whole sequences (``reference_attention``).
    tensor_parallel_overlap None: products and collectives of tensor parallelism follow one another. linear_products
    None: the linear layers of attention and of dense feed-forward blocks multiply by ``matmul``, as the others do.
    """

    rms_norm: RmsNorm
    swiglu: Swiglu
    rotary_interleaved: RotaryInterleaved
    core_attention: CoreAttention
    attention_block: AttentionBlock
    attention_block_grad: AttentionBlockGrad
    matmul: Matmul
    grouped_matmul: GroupedMatmul
    token_permute: TokenPermute
    token_unpermute: TokenUnpermute
    topk_router: TopkRouter
    log_sum_exp: LogSumExp
    cross_entropy_grad: CrossEntropyGrad
    adamw_step: AdamwStep
    names: dict[str, str] = field(default_factory=dict)
    shared_prompt_attention: SharedPromptAttention | None = None
    tensor_parallel_overlap: TensorParallelOverlap | None = None
    linear_products: LinearProducts | None = None


_EXAMPLE = "megatron.core.ops.reference:reference_ops"


def resolve(provider: str, choices: Mapping[str, bool | str] | None = None) -> TrainOps:
    """The table that ``module:function`` returns, such as ``megatron.core.ops.reference:reference_ops``.

    ``choices`` are arguments of the function: other forms of its kernels, which the config asks for. False asks for
    nothing, so every table takes it. Raises ``ValueError`` when the text has another form, the module cannot be
    imported, the result is no table, or the function has no such argument.
    """
    try:
        factory = pkgutil.resolve_name(provider)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"train ops provider {provider!r}: {error}; expected 'module:function': install the device package or use "
            f"{_EXAMPLE!r}"
        ) from error
    choices = choices or {}
    forms = inspect.signature(factory).parameters if choices else {}
    if unknown := [name for name, is_wanted in choices.items() if is_wanted and name not in forms]:
        raise ValueError(
            f"{unknown[0]}={choices[unknown[0]]}, but the train ops of {provider!r} have no such form; leave it out, "
            "or train on a device whose ops have it"
        )
    ops = factory(**{name: is_wanted for name, is_wanted in choices.items() if name in forms})
    if not isinstance(ops, TrainOps):
        raise ValueError(f"train ops provider {provider!r} returned {type(ops).__name__}; expected TrainOps")
    return ops
