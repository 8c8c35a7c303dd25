"""The rollout entries around attention and sampling: writing the KV cache in both layouts, norms, top-k and top-p.

`CASES` has the form of op_parity.py; exchanged_experts needs several processes: test_expert_exchange.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import npusim
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.npu.op_parity import BF16, FP32, Call, Entry, Maker, assert_same, assert_same_form, outcome, pairs
from tests.vllm.tiny import write_checkpoint
from vllm.ops.contract import DecodeMetadata, KVCache, LogitEdits, PrefillMetadata, RolloutOps, SamplingBatch
from vllm.ops.reference import rollout_ops as reference_rollout_ops
from vllm.v1.sample.rng import position_keys, splitmix64, vocab_keys
from vllm_ascend.ops import rollout_ops
from vllm_ascend.ops.kv_layout import read_tokens

NATIVE, REFERENCE = rollout_ops(), reference_rollout_ops()
DEEPSEEK = (512, 64)  # latent and rope channels of the fused kernels


@dataclass(frozen=True)
class Sizes:
    """What one die sees in a step."""

    tokens: int
    hidden: int
    latent: int
    rope: int
    vocabulary: int
    blocks: int
    block_size: int


TINY = Sizes(9, 24, *DEEPSEEK, vocabulary=50, blocks=3, block_size=16)
SMALL_HEADS = Sizes(9, 24, 32, 16, vocabulary=50, blocks=3, block_size=16)
# DeepSeek-V3, TP 2: a decode step of 64 sequences with 4,096 tokens each, in pages of 128.
REAL = Sizes(64, 7168, *DEEPSEEK, vocabulary=129_280, blocks=64 * 32, block_size=128)


def add_rms_norm(new: Maker, size: Sizes) -> Call:
    def run(ops: RolloutOps, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.add_rms_norm(x.clone(), residual, weight, 1e-6)

    return Call(
        run, [new.floats(size.tokens, size.hidden), new.floats(size.tokens, size.hidden), new.floats(size.hidden)]
    )


def write(new: Maker, size: Sizes, layout: str) -> Call:
    """All tokens of the cache after a write to scattered slots; kv is a slice of columns."""

    def run(ops: RolloutOps, kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor) -> Tensor:
        in_layout = layout if ops is NATIVE else "nd"
        cache = ops.new_kv_cache(size.blocks, size.block_size, size.latent, size.rope, kv.dtype, kv.device, in_layout)
        ops.norm_rope_write_kv(cache, kv[:, 3:], weight, 1e-6, (cos, sin), slots)
        return all_tokens(cache)

    cos, sin = (table.repeat(1, 2) for table in new.angles(size.tokens, size.rope // 2))
    with new.mode:
        slots = torch.arange(size.tokens).flip(0) * 2 + 5
    return Call(run, [new.floats(size.tokens, 3 + size.latent + size.rope), new.floats(size.latent), cos, sin, slots])


def all_tokens(cache: KVCache) -> Tensor:
    """[slots, L + R] whatever the table and the layout."""
    if len(cache) == 1:
        return cache[0].flatten(0, 1)
    blocks, block_size = len(cache[0]), cache[0].shape[-2]
    slots = torch.arange(blocks * block_size, device=cache[0].device)
    return torch.cat([read_tokens(pages, slots) for pages in cache], dim=-1)


def sample(
    new: Maker,
    size: Sizes,
    top_k: list[int] | None = None,
    top_p: list[float] | None = None,
    min_p: float = 0.0,
    has_edits: bool = False,
    logprobs_mode: str = "scaled_logprobs",
) -> Call:
    """Tokens and log-probs; every third row is greedy. Edits: biases, penalties, bans on a few tokens of a row."""
    rows = size.tokens
    seeds, positions = np.arange(rows).astype(np.uint64), np.arange(rows)

    def run(ops: RolloutOps, logits: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        temperature, keys, vocabulary, k, p, places, values, banned = more
        edits = LogitEdits(
            bias_at_M=places, bias_M=values, seen_at_S=places + 1, repetition_S=values.abs() + 1, penalty_S=values
        )
        batch = SamplingBatch(
            temperature_B=temperature,
            keys_B2=keys,
            vocab_keys_W=vocabulary,
            top_k_B=None if top_k is None else k,
            top_p_B=None if top_p is None else p,
            banned_BW=banned if has_edits else None,
            has_greedy=True,
            has_random=True,
            max_top_k=0 if top_k is None else max(top_k),
            min_p_B=torch.full_like(temperature, min_p) if min_p else None,
            edits=edits if has_edits else None,
            logprobs_mode=logprobs_mode,
        )
        sampled = ops.sample(logits, batch)
        return sampled.token_ids_B, sampled.logprobs_B

    with new.mode:
        tokens = torch.arange(0, size.vocabulary - 1, 5)[None, :4]
        banned = torch.zeros(rows, size.vocabulary, dtype=torch.bool)
        banned[:, 7] = True
        settings = [
            torch.tensor([0.0, 0.7, 1.3] * rows)[:rows],
            torch.from_numpy(position_keys(splitmix64(seeds), positions)),
            torch.from_numpy(vocab_keys(size.vocabulary)),
            torch.tensor((top_k or [1]) * rows, dtype=torch.int32)[:rows],
            torch.tensor((top_p or [1.0]) * rows)[:rows],
            (torch.arange(rows)[:, None] * size.vocabulary + tokens).flatten(),
            torch.linspace(-3, 3, 4).repeat(rows),
            banned,
        ]
    return Call(run, [new.floats(rows, size.vocabulary, dtype=FP32), *settings])


CASES = {
    "add_rms_norm": Entry({"sum and norm": add_rms_norm}, frozenset({"npu_add_rms_norm"})),
    "norm_rope_write_kv": Entry(
        {layout: partial(write, layout=layout) for layout in ("nd", "nz")},
        frozenset({"npu_kv_rmsnorm_rope_cache"}),
        tolerance={FP32: 1e-6, BF16: 2e-2},  # one rounding in the kernel, two in the reference
    ),
    "sample": Entry(
        {
            "top-k": partial(sample, top_k=[5, 50, 1], top_p=None),
            "top-k and top-p": partial(sample, top_k=[5, 40, 3], top_p=[0.7, 0.95, 1.0]),
            "top-p alone": partial(sample, top_k=None, top_p=[0.5]),
            "neither": sample,
            "min-p, top-k and edits": partial(sample, top_k=[5, 40, 3], min_p=0.1, has_edits=True),
            "edits alone": partial(sample, has_edits=True),
            "raw log-probs": partial(sample, logprobs_mode="raw_logprobs"),
            "processed log-probs": partial(
                sample, top_k=[5, 40, 3], min_p=0.05, has_edits=True, logprobs_mode="processed_logprobs"
            ),
        },
        frozenset({"npu_top_k_top_p"}),
        dtypes=(FP32,),
        tolerance={FP32: 1e-5},
    ),
}


@pytest.mark.parametrize("size", [TINY, SMALL_HEADS], ids=["deepseek heads", "small heads"])
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_native_equals_reference(entry: str, case: str, dtype: torch.dtype, size: Sizes) -> None:
    how = CASES[entry]
    if dtype not in how.dtypes:
        pytest.skip(f"{entry} takes {how.dtypes} only")
    call = how.cases[case](Maker(dtype), size)
    assert_same(outcome(NATIVE, call, "npu"), outcome(REFERENCE, call, "cpu"), how.tolerance)


@pytest.mark.parametrize(("entry", "case"), list(pairs(CASES)))
def test_shapes_at_the_sizes_of_deepseek_v3(entry: str, case: str) -> None:
    how = CASES[entry]
    call = how.cases[case](Maker(how.dtypes[-1], is_fake=True), REAL)
    assert_same_form(outcome(NATIVE, call, "npu"), outcome(REFERENCE, call, "cpu"))


@pytest.mark.parametrize("entry", list(CASES))
def test_native_entries_run_their_npu_ops(entry: str) -> None:
    how = CASES[entry]
    assert NATIVE.implementations[entry].split()[0] == "native"
    npusim.reset_calls()
    for case in how.cases.values():
        outcome(NATIVE, case(Maker(how.dtypes[-1]), TINY), "npu")
    assert how.npu_ops <= set(npusim.calls())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["nd", "nz"])
def test_what_prefill_writes_is_what_both_attentions_read(layout: str, dtype: torch.dtype) -> None:
    """Two sequences in scattered pages: the second half of each prompt, then one more token each."""
    heads, nope, value, lens = 4, 24, 20, np.array([40, 17])
    new = Maker(dtype)
    tables = torch.tensor([[4, 1, 6], [3, 0, 2]], dtype=torch.int32)
    kv, weight = new.floats(int(lens.sum()), sum(DEEPSEEK)), new.floats(DEEPSEEK[0])
    cos, sin = (table.repeat(1, 2) for table in new.angles(len(kv), DEEPSEEK[1] // 2))
    positions = [torch.arange(length) for length in lens]
    slots = torch.cat([tables[i].long()[p // 16] * 16 + p % 16 for i, p in enumerate(positions)])
    q, kv_b = new.floats(int(lens.sum() // 2), heads, nope + DEEPSEEK[1]), new.floats(heads, nope + value, DEEPSEEK[0])
    q_decode = new.floats(2, heads, sum(DEEPSEEK))
    new_lens = np.array([lens.sum() // 2 - 8, 8])

    def run(ops: RolloutOps, device: str) -> dict[str, Tensor]:
        cache = ops.new_kv_cache(7, 16, *DEEPSEEK, dtype, torch.device(device), layout if ops is NATIVE else "nd")
        angles = cos.to(device), sin.to(device)
        ops.norm_rope_write_kv(cache, kv.to(device), weight.to(device), 1e-6, angles, slots.to(device))
        on_device = torch.from_numpy(lens).int().to(device)
        prefill = PrefillMetadata(
            new_lens, lens, torch.tensor([0, *new_lens.cumsum()]).int().to(device), on_device, tables.to(device), 16
        )
        decode = DecodeMetadata(lens, on_device, tables.to(device), 16)
        queries = q.to(device)
        return {
            "prefill": ops.mla_prefill(
                (queries[..., :nope], queries[..., nope:]), kv_b.to(device) / 23, cache, prefill, 0.1
            ).cpu(),
            "decode": ops.mla_decode(
                (q_decode[..., : DEEPSEEK[0]].to(device), q_decode[..., DEEPSEEK[0] :].to(device)), cache, decode, 0.04
            ).cpu(),
        }

    assert_same(run(NATIVE, "npu"), run(REFERENCE, "cpu"), {FP32: 1e-5, BF16: 3e-2})


@pytest.mark.parametrize("heads", [{}, {"kv_lora_rank": 512, "qk_rope_head_dim": 64}], ids=["small", "deepseek"])
def test_generation_in_nz_equals_nd(heads: dict[str, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.vllm.test_parity import as_inputs, make_prompts
    from vllm import LLM, SamplingParams

    path = write_checkpoint(tmp_path_factory.mktemp("tiny"), **heads)
    results = []
    for layout in ("nd", "nz"):
        llm = LLM(
            path,
            skip_tokenizer_init=True,
            dtype="bfloat16",
            device="npu",
            rollout_ops="vllm_ascend.ops:rollout_ops",
            max_model_len=64,
            max_num_seqs=4,
            max_num_batched_tokens=24,
            kv_cache_layout=layout,
        )
        outputs = llm.generate(
            as_inputs(make_prompts(3, 30, seed=2)), SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
        )
        results.append([(list(o.outputs[0].token_ids), o.outputs[0].sampled_logprobs) for o in outputs])
        llm.shutdown()
    assert results[0] == results[1]


def test_nz_is_refused_where_there_is_none(tmp_path_factory: pytest.TempPathFactory) -> None:
    from vllm import LLM

    path = write_checkpoint(tmp_path_factory.mktemp("tiny"))
    with pytest.raises(ValueError, match="kv_cache_layout=nz is not supported on cpu"):
        LLM(path, skip_tokenizer_init=True, device="cpu", kv_cache_layout="nz")
