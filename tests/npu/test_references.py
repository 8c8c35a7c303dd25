"""The simulator's references beside plain torch where no op table reaches them; what a kernel leaves out or refuses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("npusim", reason="needs the simulator: source tests/npu/env.sh")
torch_npu = pytest.importorskip("torch_npu")
BF16, FP32 = torch.bfloat16, torch.float32
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
HEADS, KV_HEADS, SIZE = 4, 2, 16
FULL, CAUSAL_FROM_THE_START, CAUSAL_FROM_THE_END, BAND = 0, 2, 3, 4


def visible(mode: int, queries: int, keys: int, before: int = 3, after: int = 1) -> Tensor:
    """bool [Sq, Skv], by the pictures of the documentation: position by position."""
    seen = torch.zeros(queries, keys, dtype=torch.bool)
    for q in range(queries):
        for k in range(keys):
            from_the_end = (keys - 1 - k) - (queries - 1 - q)  # > 0: the key lies before the query
            seen[q, k] = {
                FULL: True,
                CAUSAL_FROM_THE_START: k <= q,
                CAUSAL_FROM_THE_END: from_the_end >= 0,
                BAND: -after <= from_the_end <= before,
            }[mode]
    return seen


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[N, S, D] of one sequence; every two query heads share a key head."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=0.3, enable_gqa=True)[0]


def to_layout(x_BNSD: Tensor, layout: str) -> Tensor:
    orders: dict[str, Callable[[Tensor], Tensor]] = {
        "BNSD": lambda x: x,
        "BSND": lambda x: x.transpose(1, 2),
        "BSH": lambda x: x.transpose(1, 2).flatten(2),
        "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
        "TND": lambda x: x.transpose(1, 2).flatten(0, 1),
    }
    return orders[layout](x_BNSD).contiguous()


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH", "TND"])
@pytest.mark.parametrize("mode", [FULL, CAUSAL_FROM_THE_START, CAUSAL_FROM_THE_END, BAND])
def test_fusion_attention_with_shared_key_heads(layout: str, mode: int) -> None:
    torch.manual_seed(0)
    queries, keys = (6, 6) if mode == CAUSAL_FROM_THE_START else (5, 7)
    inputs = [torch.randn(2, n, s, SIZE) for n, s in ((HEADS, queries), (KV_HEADS, keys), (KV_HEADS, keys))]
    q, k, v = theirs = [x.clone().requires_grad_() for x in inputs]
    wanted = torch.stack([attention(q[b], k[b], v[b], visible(mode, queries, keys)) for b in (0, 1)])
    upstream = torch.randn_like(wanted)
    wanted.backward(upstream)
    ours = [to_layout(x, layout).to("npu").requires_grad_() for x in inputs]
    found = torch_npu.npu_fusion_attention(
        *ours,
        HEADS,
        layout,
        atten_mask=None if mode == FULL else TRIANGLE.to("npu"),
        scale=0.3,
        pre_tockens=3,
        next_tockens=1,
        actual_seq_qlen=[queries, 2 * queries] if layout == "TND" else None,
        actual_seq_kvlen=[keys, 2 * keys] if layout == "TND" else None,
        sparse_mode=mode,
    )
    found[0].backward(to_layout(upstream, layout).to("npu"))
    assert_close(found[0], to_layout(wanted, layout))
    assert found[1].shape == ((2 * queries, HEADS, 8) if layout == "TND" else (2, HEADS, queries, 8))
    for mine, its in zip(ours, theirs, strict=True):
        assert its.grad is not None
        assert_close(mine.grad, to_layout(its.grad, layout))


def test_fusion_attention_with_a_mask_of_its_own() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, HEADS, 5, SIZE) for _ in range(3))
    hidden = torch.rand(2, 1, 5, 5) < 0.4
    hidden[..., 0] = False
    found = torch_npu.npu_fusion_attention(
        q.to("npu"), k.to("npu"), v.to("npu"), HEADS, "BNSD", atten_mask=hidden.to("npu"), scale=0.3
    )
    assert_close(found[0], F.scaled_dot_product_attention(q, k, v, ~hidden, scale=0.3))


@pytest.mark.parametrize("pages", ["none", "flat", "by head", "fractals"])
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("is_latent", [True, False], ids=["latent", "grouped"])
def test_infer_attention(is_latent: bool, layout: str, pages: str) -> None:
    """One query of each of two sequences of 20 and 7 keys, in pages of 16; of latents with positions apart."""
    if (layout, pages) == ("BNSD", "fractals"):
        pytest.skip("refused, see REFUSED")
    torch.manual_seed(0)
    lens, size, rope, kv_heads = [20, 7], *((512, 64, 1) if is_latent else (SIZE, 0, KV_HEADS))
    q, q_rope = torch.randn(2, HEADS, 1, size).to(BF16), torch.randn(2, HEADS, 1, rope).to(BF16)
    keys = [torch.randn(kv_heads, 32, channels).to(BF16) for channels in (size, size, rope) for _ in lens]
    k, v, k_rope = keys[:2], keys[2:4], keys[4:]
    wanted = torch.stack(
        [
            attention(
                torch.cat((q[b], q_rope[b]), -1).float(),
                torch.cat((k[b], k_rope[b]), -1)[:, : lens[b]].float(),
                F.pad(v[b], (0, rope))[:, : lens[b]].float(),
                visible(FULL, 1, lens[b]),
            )[..., :size]
            for b in (0, 1)
        ]
    )
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)

    def stored(parts: list[Tensor]) -> Tensor:
        if pages == "none":
            if layout == "TND":
                return torch.cat([x[:, :n].transpose(0, 1) for x, n in zip(parts, lens, strict=True)]).to("npu")
            return to_layout(torch.stack(parts), layout).to("npu")
        by_page = torch.zeros(4, kv_heads, 16, parts[0].shape[-1], dtype=BF16)
        for row, part in zip(tables.long(), parts, strict=True):
            by_page[row] = part.unflatten(1, (2, 16)).transpose(0, 1)
        if pages == "flat":
            return by_page.transpose(1, 2).flatten(2).to("npu")
        return (
            (by_page if pages == "by head" else by_page.unflatten(-1, (-1, 16)).transpose(2, 3)).contiguous().to("npu")
        )

    is_packed = layout == "TND"
    found, lse = torch_npu.npu_fused_infer_attention_score(
        to_layout(q, layout).to("npu"),
        stored(k),
        stored(v),
        query_rope=to_layout(q_rope, layout).to("npu") if is_latent else None,
        key_rope=stored(k_rope) if is_latent else None,
        num_heads=HEADS,
        num_key_value_heads=kv_heads,
        input_layout=layout,
        scale=0.3,
        block_table=None if pages == "none" else tables.to("npu"),
        block_size=0 if pages == "none" else 16,
        actual_seq_lengths=[1, 2] if is_packed else None,
        actual_seq_lengths_kv=[20, 27] if is_packed and pages == "none" else lens,
        softmax_lse_flag=True,
    )
    assert_close(found.float(), to_layout(wanted, layout), 1e-2)
    assert lse.isfinite().all() and lse.numel() == 2 * HEADS


def test_grouped_matmul_by_ends_and_what_it_leaves_unwritten() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(7, 4), torch.randn(3, 4, 5)
    options = {"split_item": 3, "group_list_type": 0}
    ends = torch.tensor([2, 2, 5]).to("npu")
    (rows,) = torch_npu.npu_grouped_matmul([x.to("npu")], [w.to("npu")], group_list=ends, group_type=0, **options)
    assert_close(rows[:5], torch.cat((x[:2] @ w[0], x[2:5] @ w[2])))
    assert rows[5:].isnan().all()
    (same,) = torch_npu.npu_grouped_matmul(
        [x.to("npu")], [e.to("npu") for e in w], group_list=ends, group_type=0, **options
    )
    assert torch.equal(same[:5].cpu(), rows[:5].cpu())
    y = torch.randn(7, 5)
    (inner,) = torch_npu.npu_grouped_matmul([x.to("npu").t()], [y.to("npu")], group_list=ends, group_type=2, **options)
    assert_close(inner[0], x[:2].t() @ y[:2])
    assert_close(inner[2], x[2:5].t() @ y[2:5])
    assert inner[1].isnan().all()


def test_grouped_products_are_added_to_what_is_there() -> None:
    torch.manual_seed(0)
    x, y, sums = torch.randn(5, 4).to(BF16), torch.randn(5, 3).to(BF16), torch.randn(3, 4, 3)
    found = sums.to("npu")
    torch_npu.npu_grouped_matmul_add_(found, x.to("npu"), y.to("npu"), torch.tensor([2, 2, 5]).to("npu"))
    parts = [x[:2].float().t() @ y[:2].float(), torch.zeros(4, 3), x[2:].float().t() @ y[2:].float()]
    assert_close(found, sums + torch.stack(parts))


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("norm", [0, 1])
def test_gating(norm: int, mode: int) -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(9, 12), torch.randn(12)
    if (norm, mode) == (1, 0):
        with pytest.raises(RuntimeError, match="softmax only"):
            torch_npu.npu_moe_gating_top_k(
                logits.to("npu"), 2, bias=bias.to("npu"), norm_type=norm, group_select_mode=mode
            )
        return
    weights, ids, scores = torch_npu.npu_moe_gating_top_k(
        logits.to("npu"),
        2,
        bias=bias.to("npu"),
        k_group=2,
        group_count=3,
        group_select_mode=mode,
        norm_type=norm,
        out_flag=True,
        routed_scaling_factor=2.5,
    )
    wanted = logits.sigmoid() if norm else logits.softmax(-1)
    assert_close(scores, wanted)
    for token in range(9):
        groups = [(wanted[token] + bias)[4 * g : 4 * g + 4].sort(descending=True).values for g in range(3)]
        totals = [float(group[:2].sum() if mode else group[0]) for group in groups]
        allowed = sorted(range(3), key=totals.__getitem__, reverse=True)[:2]
        experts = sorted((-float(wanted[token, e] + bias[e]), e) for g in allowed for e in range(4 * g, 4 * g + 4))
        chosen = [e for _, e in experts[:2]]
        assert ids[token].tolist() == chosen
        own = wanted[token, chosen]
        assert_close(weights[token], own / own.sum() * 2.5 if norm else own * 2.5)


def test_permute_of_a_part_of_the_rows() -> None:
    tokens, indices = torch.arange(8.0).view(4, 2), torch.tensor([[2, 0], [1, 0], [0, 2], [1, 2]])
    rows, row_map = torch_npu.npu_moe_token_permute(tokens.to("npu"), indices.to("npu"), num_out_tokens=3)
    assert rows[:, 0].tolist() == [0.0, 2.0, 4.0]
    assert row_map.tolist() == [5, 0, 3, 1, 2, 6, 4, 7]


def test_rotary_by_halves_and_the_gradients_of_its_angles() -> None:
    torch.manual_seed(0)
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(1, 5, 1, 8), torch.randn(1, 5, 1, 8)
    for mode in ("half", "interleave"):
        ours = [t.to("npu").requires_grad_() for t in (x, cos, sin)]
        theirs = [t.clone().requires_grad_() for t in (x, cos, sin)]
        first, second = theirs[0][..., :4], theirs[0][..., 4:]
        turned = torch.cat((-second, first), -1)
        if mode == "interleave":
            turned = torch.stack((-theirs[0][..., 1::2], theirs[0][..., 0::2]), -1).flatten(-2)
        wanted = theirs[0] * theirs[1] + turned * theirs[2]
        found = torch_npu.npu_rotary_mul(*ours, rotary_mode=mode)
        assert_close(found, wanted)
        upstream = torch.randn_like(wanted)
        wanted.backward(upstream)
        found.backward(upstream.to("npu"))
        for mine, its in zip(ours, theirs, strict=True):
            assert_close(mine.grad, its.grad)


REFUSED: dict[str, tuple[str, Callable[[], object]]] = {
    "ends that do not reach the last token": (
        "last end",
        lambda: torch_npu.npu_fusion_attention(
            *[ones(4, 2, 16)] * 3, 2, "TND", actual_seq_qlen=[3], actual_seq_kvlen=[4]
        ),
    ),
    "a causal mode without its triangle": (
        "2048 x 2048",
        lambda: torch_npu.npu_fusion_attention(*[ones(1, 2, 4, 16)] * 3, 2, "BNSD", sparse_mode=3),
    ),
    "more queries than keys": (
        "queries of",
        lambda: torch_npu.npu_fusion_attention(
            ones(1, 2, 5, 16), *[ones(1, 2, 4, 16)] * 2, 2, "BNSD", atten_mask=TRIANGLE.to("npu"), sparse_mode=3
        ),
    ),
    "float32 in rollout attention": (
        "float16 or bfloat16",
        lambda: torch_npu.npu_fused_infer_attention_score(*[ones(1, 2, 1, 16)] * 3, num_heads=2, input_layout="BNSD"),
    ),
    "fractals with queries by head": (
        "NZ pages want queries as BSND",
        lambda: latent_attention(HEADS, ones(3, 1, 32, 16, 16, dtype=BF16), ones(3, 1, 4, 16, 16, dtype=BF16)),
    ),
    "three heads over latents": (
        "heads, got 3", lambda: latent_attention(3, ones(3, 16, 512, dtype=BF16), ones(3, 16, 64, dtype=BF16))
    ),
    "narrow latents": (
        r"wants \(512, 64\) channels",
        lambda: latent_attention(HEADS, ones(3, 16, 32, dtype=BF16), ones(3, 16, 64, dtype=BF16)),
    ),
    "gating without a bias": ("wants a bias", lambda: torch_npu.npu_moe_gating_top_k(ones(4, 8), 2, norm_type=1)),
    "groups past the rows": (
        "past 4",
        lambda: torch_npu.npu_grouped_matmul(
            [ones(4, 2)], [ones(2, 2, 2)], group_list=torch.tensor([3, 2]).to("npu"), split_item=3, group_type=0,
            group_list_type=1,
        ),
    ),
    "an inner split of an x that is not transposed": (
        "transposed",
        lambda: torch_npu.npu_grouped_matmul(
            [ones(2, 4)], [ones(4, 3)], group_list=torch.tensor([3, 1]).to("npu"), split_item=3, group_type=2,
            group_list_type=1,
        ),
    ),
    "float32 factors of a product that is added": (
        "float16 or bfloat16",
        lambda: torch_npu.npu_grouped_matmul_add_(
            ones(1, 2, 3), ones(4, 2), ones(4, 3), torch.tensor([4]).to("npu")
        ),
    ),
    "rows of no group in products that are added": (
        "ends at 3 of 4",
        lambda: torch_npu.npu_grouped_matmul_add_(
            ones(1, 2, 3), ones(4, 2, dtype=BF16), ones(4, 3, dtype=BF16), torch.tensor([3]).to("npu")
        ),
    ),
    "an empty tensor": ("not empty", lambda: torch_npu.npu_swiglu(ones(0, 8))),
    "a page that is not there": (
        "names a page",
        lambda: torch_npu.npu_fused_infer_attention_score(
            ones(1, 2, 1, 16, dtype=BF16), *[ones(3, 2, 16, 16, dtype=BF16)] * 2, num_heads=2, input_layout="BNSD",
            block_table=torch.tensor([[7]], dtype=torch.int32).to("npu"), block_size=16, actual_seq_lengths_kv=[5],
        ),
    ),
    "a slot outside of the cache": (
        "outside",
        lambda: torch_npu.npu_scatter_nd_update_(ones(4, 2), torch.tensor([[4]]).to("npu"), ones(1, 2)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_a_kernel_refuses(what: str) -> None:
    message, call = REFUSED[what]
    with pytest.raises(RuntimeError, match=message):
        call()


def test_old_cann_takes_fewer_numbers_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = ones(3, 16, 512, dtype=BF16), ones(3, 16, 64, dtype=BF16)
    assert latent_attention(16, *pages).shape == (1, 16, 1, 512)
    monkeypatch.setenv("FAKE_NPU_CANN", "8.2.RC1")
    with pytest.raises(RuntimeError, match="heads, got 16"):
        latent_attention(16, *pages)
    assert latent_attention(32, *pages).shape == (1, 32, 1, 512)


def latent_attention(heads: int, pages: Tensor, rope_pages: Tensor) -> Tensor:
    """[1, N, 1, L] of one query, by head."""
    latent = pages.shape[-1] * (pages.shape[2] if pages.dim() == 5 else 1)
    query, query_rope = (ones(1, heads, 1, channels, dtype=BF16) for channels in (latent, 64))
    out: Tensor = torch_npu.npu_fused_infer_attention_score(
        query, pages, pages, query_rope=query_rope, key_rope=rope_pages, num_heads=heads, num_key_value_heads=1,
        input_layout="BNSD", block_table=torch.zeros(1, 1, dtype=torch.int32, device="npu"), block_size=16,
        actual_seq_lengths_kv=[5],
    )[0]  # fmt: skip
    return out


def ones(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.ones(*shape, dtype=dtype, device="npu")


def assert_close(found: Tensor | None, wanted: Tensor | None, tolerance: float = 1e-5) -> None:
    assert found is not None and wanted is not None and found.shape == wanted.shape
    gap = (found.detach().cpu().double() - wanted.detach().double()).abs().max().item()
    assert math.isfinite(gap) and gap <= tolerance * max(1.0, wanted.detach().abs().max().item()), gap
