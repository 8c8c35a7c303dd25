"""The CPU table against the reference, entry by entry, and what a row's result must not depend on."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_formats.cpu_kernels import instructions
from tests.npu.op_parity import Maker, assert_same, outcome, pairs
from tests.npu.rollout_op_cases import CASES, SMALL
from tests.tiny_models import write_model
from vllm import LLM, SamplingParams
from vllm.ops.contract import DecodeMetadata, PrefillMetadata, RolloutOps, RouterSettings, SamplingBatch, resolve
from vllm.ops.cpu import build
from vllm.ops.cpu.build import native_build
from vllm.ops.cpu.calls import Bfloat16Products
from vllm.ops.cpu.table import best_products, cpu_table
from vllm.ops.reference import rollout_ops as reference_ops
from vllm.platforms import resolve_platform
from vllm.platforms.cpu import LARGE_PAGE_BYTES
from vllm.v1.sample.rng import position_keys, splitmix64, vocab_keys

BUILDS_KERNELS = True  # when it is imported (tests/compiler.py)
REFERENCE = reference_ops()
WIDENED, DOT = cpu_table(Bfloat16Products.WIDENED), cpu_table(Bfloat16Products.DOT)
# Pairs are emulated where the processor has no instructions for them; tiles are not.
TABLES = {"fp32": (WIDENED, torch.float32), "bf16 widened": (WIDENED, torch.bfloat16), "bf16": (DOT, torch.bfloat16)}
if best_products() is Bfloat16Products.TILES:
    TABLES["bf16 tiles"] = (cpu_table(Bfloat16Products.TILES), torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize(
    ("entry", "case"), [p for p in pairs(CASES) if not p[1].endswith("fractals") and "gqa" not in p[0]]
)
def test_an_entry_equals_the_reference(entry: str, case: str, how: str) -> None:
    table, dtype = TABLES[how]
    if dtype not in CASES[entry].dtypes:
        pytest.skip(f"{entry} takes {CASES[entry].dtypes}")
    call = CASES[entry].cases[case](Maker(dtype), SMALL)
    assert_same(outcome(table, call, "cpu"), outcome(REFERENCE, call, "cpu"), TOLERANCE)


def gap(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize("rows", [1, 13, 29, 130, 300])
@pytest.mark.parametrize(("size_in", "size_out"), [(33, 40), (256, 96), (64, 20), (1090, 70)])
def test_products_of_all_shapes(how: str, rows: int, size_in: int, size_out: int) -> None:
    table, dtype = TABLES[how]
    x = torch.randn(rows, size_in + 5).to(dtype)[:, 5:]
    for weight in (torch.randn(size_out, size_in), torch.randn(size_in, size_out).t()):
        wanted = x.double() @ weight.to(dtype).double().t()
        assert gap(table.linear(x, weight.to(dtype)), wanted) < TOLERANCE[dtype] / 4


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize(("size_in", "size_out"), [(40, 300), (128, 512), (7, 33)])
def test_products_of_heads(how: str, size_in: int, size_out: int) -> None:
    table, dtype = TABLES[how]
    x = torch.randn(70, 3, size_in + 8).to(dtype)[..., :size_in]
    for weight in (torch.randn(3, size_in, size_out), torch.randn(3, size_out, size_in).transpose(1, 2)):
        wanted = torch.einsum("tni,nio->tno", x.double(), weight.to(dtype).double())
        assert gap(table.head_linear(x, weight.to(dtype)), wanted) < TOLERANCE[dtype] / 4


def attention(
    table: RolloutOps, lens: list[int], dtype: torch.dtype, sizes: tuple[int, int, int], block: int
) -> Tensor:
    heads, latent, rope = sizes
    generator = torch.Generator().manual_seed(0)
    blocks = -(-max(lens) // block)
    tables = torch.randperm(len(lens) * blocks, generator=generator).int().view(len(lens), blocks)
    pages = torch.randn(tables.numel(), block, latent + rope, generator=generator).to(dtype)
    q = torch.randn(len(lens), heads, latent + rope, generator=generator).to(dtype)
    meta = DecodeMetadata(np.array(lens), torch.tensor(lens).int(), tables, block)
    return table.mla_decode((q[..., :latent], q[..., latent:]), (pages,), meta, 0.1)


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize("sizes", [(8, 512, 64), (3, 64, 16), (17, 44, 6), (5, 33, 7)])
def test_decode_over_spans(how: str, sizes: tuple[int, int, int]) -> None:
    """Contexts of one token, of one span, at its border, and of several."""
    table, dtype = TABLES[how]
    lens = [1, 511, 512, 513, 1300, 17]
    found, wanted = (attention(ops, lens, dtype, sizes, 16) for ops in (table, REFERENCE))
    assert gap(found, wanted) < TOLERANCE[dtype]


def rows_of(ops: RolloutOps, dtype: torch.dtype, rows: slice) -> list[Tensor]:
    """Every entry on some rows of a batch of 40."""
    generator = torch.Generator().manual_seed(1)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, weight, w13, w2 = new(40, 48), new(48, 64).t(), new(5, 48, 64).transpose(1, 2), new(5, 32, 48).transpose(1, 2)
    logits = torch.randn(40, 5, generator=generator)
    routed = ops.topk_router(logits[rows], torch.zeros(5), RouterSettings(2, 1, 1, True, 1.0, "sigmoid"))
    kv_b, q = new(2, 24, 32), new(40, 2, 20)
    return [
        ops.linear(x[rows], weight),
        ops.rms_norm(x[rows], weight[0].contiguous(), 1e-6),
        ops.fused_experts(x[rows], (w13, w2), routed, 0),
        ops.head_linear(q[rows][..., :12], kv_b[:, :12]),
    ]


@pytest.mark.parametrize("how", list(TABLES))
def test_no_rows_give_no_rows(how: str) -> None:
    """A rank without tokens runs the layers that others wait in; a router's few columns have a kernel with AVX-512."""
    table, dtype = TABLES[how]
    assert [len(found) for found in rows_of(table, dtype, slice(0))] == [0] * 4
    new = Maker(dtype)
    for size_out in (8, 100, 512):
        weight = new.floats(size_out, 64)
        for given in (weight, weight.t().contiguous().t(), table.new_weight([size_out], 64)):
            assert table.linear(new.floats(0, 64), given).shape == (0, size_out)


@pytest.mark.parametrize("experts", [5, 16, 37, 128])
def test_routing_takes_the_first_of_equal_experts_and_survives_nan(experts: int) -> None:
    """As an argmax from the front would: equal logits by index, experts named once, none outside of the range."""
    ops = TABLES["fp32"][0]
    logits = torch.stack([torch.zeros(experts), torch.arange(experts) % 3.0, torch.full((experts,), torch.nan)])
    for scoring in ("sigmoid", "softmax"):
        _, ids = ops.topk_router(logits, None, RouterSettings(4, 1, 1, True, 1.0, scoring))
        assert ids[0].tolist() == [0, 1, 2, 3]
        assert ids[1].tolist() == [i for value in (2, 1, 0) for i in range(value, experts, 3)][:4]
        assert ((ids[2] >= 0) & (ids[2] < experts)).all()


@pytest.mark.parametrize("how", list(TABLES))
def test_a_row_is_the_same_in_any_batch(how: str) -> None:
    table, dtype = TABLES[how]
    everything = rows_of(table, dtype, slice(None))
    for part in (slice(0, 1), slice(3, 20), slice(39, 40)):
        for alone, together in zip(rows_of(table, dtype, part), everything, strict=True):
            assert torch.equal(alone, together[part])


@pytest.mark.parametrize("how", list(TABLES))
def test_results_do_not_depend_on_the_number_of_threads(how: str) -> None:
    table, dtype = TABLES[how]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append([*rows_of(table, dtype, slice(None)), *_attended(table, dtype)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _attended(table: RolloutOps, dtype: torch.dtype) -> list[Tensor]:
    return [attention(table, [700, 3, 1025], dtype, (8, 64, 16), 16)]


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize(("heads", "cached", "length"), [(4, 0, 37), (8, 0, 37), (17, 3, 12), (8, 500, 30)])
def test_prefill_equals_decode_bit_by_bit(how: str, heads: int, cached: int, length: int) -> None:
    """A prompt in one step, in chunks, and token by token; behind cached tokens and over a span's border too."""
    table, dtype = TABLES[how]
    nope, latent, rope, value = 24, 64, 16, 20
    end = cached + length
    q = torch.randn(length, heads, nope + rope).to(dtype)
    kv_b = torch.randn(heads, nope + value, latent).to(dtype)
    tables = torch.randperm(-(-end // 16)).int()[None]
    pages = torch.randn(tables.numel(), 16, latent + rope).to(dtype)

    def prefill(start: int, stop: int) -> Tensor:
        new, total = np.array([stop - start]), np.array([cached + stop])
        cu, seen = torch.tensor([0, stop - start]).int(), torch.tensor([cached + stop]).int()
        meta = PrefillMetadata(new, total, cu, seen, tables, 16)
        return table.mla_prefill((q[start:stop, :, :nope], q[start:stop, :, nope:]), kv_b, (pages,), meta, 0.1)

    def decode(index: int) -> Tensor:
        seen = cached + index + 1
        meta = DecodeMetadata(np.array([seen]), torch.tensor([seen]).int(), tables, 16)
        one = q[index : index + 1]
        q_latent = table.head_linear(one[..., :nope], kv_b[:, :nope])
        attended = table.mla_decode((q_latent, one[..., nope:]), (pages,), meta, 0.1)
        return table.head_linear(attended, kv_b[:, nope:].transpose(1, 2))

    whole = prefill(0, length)
    cut = length // 2 + 1
    assert torch.equal(torch.cat([prefill(0, cut), prefill(cut, length)]), whole)
    assert torch.equal(torch.cat([decode(i) for i in range(length)]), whole)


@pytest.mark.parametrize("how", list(TABLES))
@pytest.mark.parametrize("heads", [3, 8, 20])
@pytest.mark.parametrize(
    ("common", "own", "block"),
    [(512, (1, 90), 16), (200, (1, 700), 16), (1100, (1, 500), 4), (96, (0, 0), 32), (64, (1, 40), 48)],
)
def test_sequences_with_common_blocks_attend_as_alone(
    how: str, heads: int, common: int, own: tuple[int, int], block: int
) -> None:
    """Samples of two prompts, which themselves begin alike, between strangers; bit by bit."""
    table, dtype = TABLES[how]
    draw, latent, rope = random.Random(0), 64, 16
    prompt, fresh = -(-common // block), iter(draw.sample(range(4000), 4000))
    first = [next(fresh) for _ in range(prompt)]
    second = [*first[: prompt // 2], *(next(fresh) for _ in range(prompt - prompt // 2))]
    lens, tables = [], []
    for shared in ([], *[first] * 9, *[second] * 4, [], first):
        lens.append(max(1, len(shared) * block - block // 2 * (own == (0, 0)) + draw.randint(*own)))
        own_blocks = max(0, -(-lens[-1] // block) - len(shared))
        tables.append([*shared, *(next(fresh) for _ in range(own_blocks))])
    width = max(map(len, tables))
    tables_BW = torch.tensor([row + [0] * (width - len(row)) for row in tables]).int()
    generator = torch.Generator().manual_seed(0)
    pages = torch.randn(4000, block, latent + rope, generator=generator).to(dtype)
    q = torch.randn(len(lens), heads, latent + rope, generator=generator).to(dtype)

    def attended(part: slice) -> Tensor:
        meta = DecodeMetadata(np.array(lens)[part], torch.tensor(lens)[part].int(), tables_BW[part].contiguous(), block)
        return table.mla_decode((q[part, :, :latent], q[part, :, latent:]), (pages,), meta, 0.1)

    together = attended(slice(None))
    for b in range(len(lens)):
        assert torch.equal(attended(slice(b, b + 1))[0], together[b]), b


def sampled(ops: RolloutOps, vocabulary: int, temperatures: list[float]) -> tuple[Tensor, Tensor]:
    rows = len(temperatures)
    logits = torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(2)) * 3
    keys = torch.from_numpy(position_keys(splitmix64(np.arange(rows).astype(np.uint64)), np.arange(rows)))
    batch = SamplingBatch(
        temperature_B=torch.tensor(temperatures),
        keys_B2=keys,
        vocab_keys_W=torch.from_numpy(vocab_keys(vocabulary)),
        top_k_B=None,
        top_p_B=None,
        banned_BW=None,
        has_greedy=0.0 in temperatures,
        has_random=any(temperatures),
    )
    found = ops.sample(logits, batch)
    return found.token_ids_B, found.logprobs_B


@pytest.mark.parametrize("vocabulary", [5, 50, 2048])
def test_sampling_draws_what_the_reference_draws(vocabulary: int) -> None:
    temperatures = [0.0, 0.7, 1.0, 1.5] * 100
    found, wanted = (sampled(ops, vocabulary, temperatures) for ops in (WIDENED, REFERENCE))
    assert torch.equal(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1], atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(
    ("name", "dtype"), [("deepseek-v3", "float32"), ("deepseek-v3", "bfloat16"), ("qwen3", "bfloat16")]
)
def test_a_request_is_the_same_bit_by_bit_whatever_runs_beside_it(name: str, dtype: str, tmp_path: Path) -> None:
    """Alone, in a batch, in chunks of 7 tokens, with too few blocks for all, with its prompt's blocks cached, and where
    the last layer goes on with all tokens of the prompt, as log-probs of these want it.
    """
    path, draw = str(write_model(tmp_path, name, seed=0)[0]), random.Random(0)
    prompts = [{"prompt_token_ids": [draw.randrange(2, 120) for _ in range(n)]} for n in (3, 40, 17, 25, 40)]

    def outcomes(prompt_logprobs: int | None = None, **settings: int) -> list[tuple[list[int], list[float]]]:
        kind = partial(SamplingParams, max_tokens=12, ignore_eos=True, prompt_logprobs=prompt_logprobs)
        params = [kind(seed=i) for i in range(len(prompts))]
        arguments = {"max_model_len": 64, "max_num_seqs": 5, "num_gpu_blocks_override": 40} | settings
        llm = LLM(path, skip_tokenizer_init=True, dtype=dtype, device="cpu", block_size=8, **arguments)
        found = [output.outputs[0] for output in llm.generate(prompts, params)]
        again = [output.outputs[0] for output in llm.generate(prompts, params)]
        assert [x.sampled_logprobs for x in again] == [x.sampled_logprobs for x in found]
        return [(list(x.token_ids), list(x.sampled_logprobs)) for x in found]

    together = outcomes()
    assert outcomes(max_num_seqs=1) == together
    assert outcomes(max_num_batched_tokens=7) == together
    assert outcomes(num_gpu_blocks_override=12) == together
    assert outcomes(prompt_logprobs=0) == together
    assert outcomes(prompt_logprobs=0, max_num_batched_tokens=7) == together


def test_the_cpu_platform_uses_this_table() -> None:
    table = resolve(resolve_platform("cpu").rollout_ops)
    assert table.implementations["linear"] == "native"
    assert table.implementations["mla_decode"] == "native"
    assert (best_products() is Bfloat16Products.WIDENED) != ("avx512_bf16" in instructions())


def test_weights_lie_in_large_pages_where_the_system_has_them() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.is_file() or "[never]" in setting.read_text():
        pytest.skip("this system has no transparent large pages")
    tensor = torch.empty(5 * LARGE_PAGE_BYTES, dtype=torch.uint8)
    resolve_platform("cpu").prefer_large_pages(tensor)
    middle = tensor.data_ptr() + 2 * LARGE_PAGE_BYTES
    flags, is_inside = "", False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            first, last = (int(part, 16) for part in line.split()[0].split("-"))
            is_inside = first <= middle < last
        elif is_inside and line.startswith("VmFlags:"):
            flags = line
    assert " hg" in flags


def test_ranks_that_start_together_build_the_kernels_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, compiler = tmp_path / "calls", tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nsleep 0.2\nfor last; do :; done\ncase "$last" in /*) : > "$last";; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: native_build().path(), range(2))
    assert first == second and first.is_file()
    assert sum(" -shared " in call for call in calls.read_text().splitlines()) == 1


def test_without_a_compiler_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.ops.cpu.build import kernels

    build: Callable[[], object] = kernels.__wrapped__
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"no-such-compiler.*rollout_ops='vllm.ops.reference"):
        build()


def test_without_a_compiler_the_default_is_the_reference_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    table = resolve(resolve_platform("cpu").rollout_ops)
    assert set(table.implementations.values()) == {"reference"}
    assert "no C++ compiler" in caplog.text


def test_with_a_broken_compiler_the_default_is_the_reference_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text("#!/bin/sh\necho too old >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "kernels", build.kernels.__wrapped__)  # as in a process that has none yet
    table = resolve(resolve_platform("cpu").rollout_ops)
    assert set(table.implementations.values()) == {"reference"}
    assert "several times slower" in caplog.text and "too old" in caplog.text
    with pytest.raises(RuntimeError, match="too old"):  # what was asked for by name
        build.kernels()


@pytest.mark.parametrize("size", [12, 160, 5000])
def test_settings_of_other_rows_change_no_log_prob(size: int) -> None:
    """Rows with limits of their own take another way to their tokens."""
    ops, rows = TABLES["fp32"][0], 40
    logits, keys = torch.randn(rows, size) * 4, np.arange(rows, dtype=np.uint64)
    settings = SamplingBatch(
        torch.tensor([1.0, 0.7, 0.0, 1.3] * 10),
        torch.from_numpy(position_keys(splitmix64(keys), np.zeros(rows, dtype=np.int64))),
        torch.from_numpy(vocab_keys(size)),
        None,
        None,
        None,
        True,
        True,
    )
    alone = ops.sample(logits.clone(), settings)
    unlimited = {"top_p_B": torch.ones(rows), "min_p_B": torch.zeros(rows), "num_top_logprobs": 2}
    for name, value in unlimited.items():
        found = ops.sample(logits.clone(), replace(settings, **{name: value}))
        assert torch.equal(found.token_ids_B, alone.token_ids_B) and torch.equal(found.logprobs_B, alone.logprobs_B)
