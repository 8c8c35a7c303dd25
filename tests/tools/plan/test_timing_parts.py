"""The parts of the cost model against what they stand for: samples, schedules, published micro-measurements."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.core.parallel_layout import ParallelLayout
from megatron.core.pipeline_parallel.schedule_table import rank_order
from tools.plan.command import _lengths, _parser
from tools.plan.devices import load_device
from tools.plan.model_work import busiest_rank, model_work, train_flops_per_token
from tools.plan.timing.constants import load_constants
from tools.plan.timing.lengths import length_distribution
from tools.plan.timing.links import Group, Links, layout_group
from tools.plan.timing.published import PublishedRun, published_model, published_runs
from tools.plan.timing.rollout import RolloutTimes, rollout_seconds
from tools.plan.timing.run_shape import default_lengths
from tools.plan.timing.training import pipeline_seconds
from tools.plan.timing.transitions import dispatch_seconds, weight_sync_seconds
from tools.plan.timing.turns import TOOLS, Turns, generation_terms
from verl.trainer.config import load_config

ROOT = Path(__file__).resolve().parents[3]


def run_called(name: str) -> PublishedRun:
    return next(run for run in published_runs() if run.name == name)


# ---- lengths


@pytest.mark.parametrize(("mean", "limit"), [(1576.6, 3072), (1385.0, 2048), (500.0, 8192), (2040.0, 2048)])
def test_lengths_have_the_mean_and_keep_the_limit(mean: float, limit: int) -> None:
    lengths = length_distribution(mean, limit)
    assert lengths.mean == pytest.approx(mean, rel=1e-6)
    assert lengths.longest <= limit
    assert lengths.mean_square >= mean * mean * (1 - 1e-9)


def test_the_longest_of_several_is_what_samples_show() -> None:
    lengths = length_distribution(500.0, 8192)
    shares = [high - low for low, high in zip((0.0, *lengths.below), lengths.below, strict=False)]
    draw = random.Random(0)
    for count in (2, 8, 64):
        sampled = [max(draw.choices(lengths.points, shares, k=count)) for _ in range(4000)]
        assert lengths.max_of(count) == pytest.approx(sum(sampled) / len(sampled), rel=0.03)
        sums = [max(sum(draw.choices(lengths.points, shares, k=4)) for _ in range(count)) for _ in range(1500)]
        assert lengths.max_of_sums(count, 4) == pytest.approx(sum(sums) / len(sums), rel=0.15)


def test_equal_lengths_and_impossible_ones() -> None:
    assert length_distribution(3039.8, 3072, 0.0).max_of(8192) == 3039.8
    with pytest.raises(ValueError, match="mean response length 3000 is outside"):
        length_distribution(3000, 2048)


# ---- work


def test_parameters_are_those_of_the_model() -> None:
    hf = published_model("deepseek_v3")
    work = model_work(hf)
    norms_and_biases = 61 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 256
    assert work.parameters + norms_and_biases == 671_026_419_200
    assert model_work(published_model("qwen3_235b_a22b")).parameters == pytest.approx(235.1e9, rel=0.001)


def test_operations_are_those_of_every_matmul() -> None:
    """Twice the weights that a token meets, and scores and values over the causal half of 1000 tokens."""
    hf = published_model("deepseek_v3")
    heads, hidden = hf.num_attention_heads, hf.hidden_size
    assert hf.q_lora_rank is not None
    query = hf.q_lora_rank * (hidden + heads * hf.qk_head_dim)
    latent = hidden * (hf.kv_lora_rank + hf.qk_rope_head_dim)
    up = hf.kv_lora_rank * heads * (hf.qk_nope_head_dim + hf.v_head_dim)
    attention = query + latent + up + heads * hf.v_head_dim * hidden
    expert = 3 * hidden * hf.moe_intermediate_size
    moe = expert * (hf.num_experts_per_tok + hf.n_shared_experts) + hidden * hf.n_routed_experts
    weights = 61 * attention + 58 * moe + 3 * 3 * hidden * hf.intermediate_size + hf.vocab_size * hidden
    scores = 1000 * 1001 / 2 * heads * (hf.qk_head_dim + hf.v_head_dim) * 61
    forward = train_flops_per_token(model_work(hf), context=(1000 + 1) / 2)
    assert forward * 1000 == pytest.approx(2.0 * (weights * 1000 + scores), rel=1e-9)


def test_the_busiest_rank_is_what_samples_show() -> None:
    draw, spread = random.Random(1), 0.6
    for ranks in (8, 32):
        size = 256 // ranks
        sampled = [
            max(sum(draw.gauss(1.0, spread) for _ in range(size)) / size for _ in range(ranks)) for _ in range(400)
        ]
        # sqrt(2 ln R) is the limit of many ranks, from above.
        assert sum(sampled) / 400 < busiest_rank(256, ranks, spread) < 1.12 * sum(sampled) / 400
    assert busiest_rank(256, 1, spread) == busiest_rank(0, 8, spread) == 1.0


# ---- links


def test_groups_stand_where_the_layout_puts_them() -> None:
    layout = ParallelLayout(
        world_size=256, tensor_model_parallel_size=8, pipeline_model_parallel_size=8, expert_model_parallel_size=32
    )
    assert layout_group(layout, ("tp",), False, 8) == Group(8, 8)
    assert layout_group(layout, ("ep",), True, 8) == Group(32, 8)
    assert layout_group(layout, ("pp",), False, 8) == Group(8, 1)
    assert layout_group(layout, ("ep",), True, 768).is_in_domain


def test_collectives_cost_more_where_they_leave_the_domain() -> None:
    links = Links.of(load_device("h100"), 1.0)
    near, far = Group(8, 8), Group(8, 1)
    for collective in (links.gather, links.all_to_all, links.all_reduce):
        assert collective(1e9, near) < collective(1e9, far)
        assert collective(1e9, Group(1, 1)) == 0.0
    assert links.gather(1e9, near) == pytest.approx(7 / 8 * 1e9 / 450e9, rel=0.01)
    assert links.all_to_all(1e9, far) == pytest.approx(7 / 8 * 1e9 / 50e9, rel=0.01)


# ---- pipeline


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("stages", [(1.0,) * 4, (0.9, 1.0, 1.0, 0.9), (0.6, 1.0, 1.0, 1.1)])
@pytest.mark.parametrize("num_microbatches", [4, 32])
def test_the_pipeline_takes_as_long_as_its_schedule(
    num_chunks: int, stages: tuple[float, ...], num_microbatches: int
) -> None:
    ran = schedule_seconds(stages, num_microbatches, num_chunks)
    assert pipeline_seconds(stages, num_microbatches, num_chunks) == pytest.approx(ran, rel=0.08)


def schedule_seconds(stages: Sequence[float], num_microbatches: int, num_chunks: int) -> float:
    """When the last task ends if every stage runs its tasks in 1F1B order as soon as their inputs are there.

    A task forward takes a third of the stage's share for a chunk, one backward two thirds.
    """
    size = len(stages)
    orders: list[list[tuple[bool, int, int]]] = []
    for rank in range(size):
        order = rank_order(num_microbatches, num_chunks, size, rank, False)
        orders.append([(is_backward, task.microbatch, task.chunk) for is_backward, task in order])
    ended: dict[tuple[bool, int, int], float] = {}  # (is backward, micro-batch, virtual stage)
    free, place = [0.0] * size, [0] * size
    last = size * num_chunks - 1
    while any(at < len(order) for at, order in zip(place, orders, strict=True)):
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                is_backward, microbatch, chunk = order[place[rank]]
                stage = chunk * size + rank
                if is_backward:
                    needed = (True, microbatch, stage + 1) if stage < last else (False, microbatch, stage)
                else:
                    needed = (False, microbatch, stage - 1)
                if stage > 0 or is_backward:
                    if needed not in ended:
                        break
                    free[rank] = max(free[rank], ended[needed])
                free[rank] += stages[rank] / num_chunks * (2 / 3 if is_backward else 1 / 3)
                ended[is_backward, microbatch, stage] = free[rank]
                place[rank] += 1
    return max(free)


# ---- published micro-measurements


def test_decode_steps_are_those_of_the_published_table() -> None:
    """cann's time per output token of DeepSeek-V3 on 256 dies, by the size of the captured graph."""
    run, rates = run_called("cann, random weights"), load_constants().rates("ascend")
    shape = replace(run.shape, rollout=replace(run.shape.rollout, graph_sizes=()))
    for sequences, published_ms in ((64, 76), (32, 67), (16, 61), (8, 57), (4, 55), (2, 54), (1, 54)):
        step = RolloutTimes(shape, run.device, rates).decode_step(sequences, 3072)
        assert 1e3 * (sum(step.values()) - step["host"]) == pytest.approx(published_ms, rel=0.1)


def test_fp8_is_faster_where_a_device_multiplies_it() -> None:
    """Scores stay in bf16; elsewhere FP8 weights are storage, and a prefill takes as long as with others."""
    run, rates = run_called("cann, random weights"), load_constants().rates("cuda")
    in_fp8 = replace(run.shape, rollout=replace(run.shape.rollout, weight_bytes=1.0))
    hopper, without = load_device("h100"), replace(load_device("h100"), peak_fp8_tflops=0.0)
    fp8_s, bf16_s, stored_s = (
        rollout_seconds(shape, device, rates)["prefill"]
        for shape, device in ((in_fp8, hopper), (run.shape, hopper), (in_fp8, without))
    )
    assert 0.5 * bf16_s < fp8_s < 0.7 * bf16_s and stored_s == bf16_s
    many = 4096.0  # what counts is what is multiplied
    times = (RolloutTimes(in_fp8, device, rates) for device in (hopper, without))
    fp8_s, stored_s = (found.decode_step(many, 64)["weights"] for found in times)
    assert fp8_s == pytest.approx(stored_s * 989 / 1979, rel=0.2)


def test_turns_cost_what_their_tools_keep_from_decoding() -> None:
    """Without tools they take as long as single answers; other samples hide calls, until the last ones wait."""
    run, rates = run_called("cann, random weights"), load_constants().rates("ascend")

    def seconds(turns: Turns | None) -> dict[str, float]:
        lengths = replace(run.shape.lengths, turns=turns)
        return rollout_seconds(replace(run.shape, lengths=lengths), run.device, rates)

    single = sum(seconds(None).values())
    assert sum(seconds(Turns(4, 8, 0.0, 0.0)).values()) == pytest.approx(single, rel=0.1)
    quick, slow = seconds(Turns(4, 8, 2.0, 0.0)), seconds(Turns(4, 8, 1000.0, 0.0))
    assert quick[TOOLS] < 0.02 * single and sum(quick.values()) < 1.2 * single
    assert slow[TOOLS] > 0.5 * sum(slow.values()) > 1000
    given = seconds(Turns(4, 8, 0.0, 200.0))
    assert given["prefill"] > seconds(None)["prefill"]
    assert sum(given.values()) - given["prefill"] < single - seconds(None)["prefill"]


def test_means_of_turns_are_those_of_a_run_with_turns() -> None:
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={ROOT / 'recipes/r1_tools/tools.yaml'}"
    config = load_config([tools], config_name="r1_tools", config_dir=ROOT / "recipes/r1_tools/config")
    usual = default_lengths(config)
    assert usual.turns == Turns(2.0, 4, 1.0, 64.0)
    given = _parser().parse_args(["r1_tools", "--mean-turns", "3", "--mean-tool-seconds", "9"])
    assert _lengths(given, usual).turns == Turns(3.0, 4, 9.0, 64.0)
    with pytest.raises(ValueError, match="multi_turn.enable is False"):
        _lengths(given, default_lengths(load_config()))
    with pytest.raises(ValueError, match="9 turns with 64 given tokens"):
        _lengths(_parser().parse_args(["r1_tools", "--mean-turns", "9"]), usual)


def test_waiting_samples_leave_their_slot_to_others() -> None:
    """64 samples of two turns on 8 slots; a step takes a second, whatever runs."""
    lengths = length_distribution(10.0, 10)

    def spent(tool_s: float, slots: float) -> dict[str, float]:
        turns = Turns(2, 2, tool_s, 0.0, spread=0.0)
        return generation_terms(turns, lengths, 4.0, 64.0, slots, 1, lambda sequences, context: {"step": 1.0})

    assert spent(0.0, 64) == {TOOLS: 0.0, "step": 10.0}
    assert spent(30.0, 64) == {TOOLS: 30.0, "step": 10.0}
    assert spent(0.0, 8) == {TOOLS: 0.0, "step": 80.0}
    assert spent(30.0, 8) == {TOOLS: 0.0, "step": 80.0}  # the first eight return while others decode


def test_dispatch_is_as_late_as_published() -> None:
    """cann 3.2.4: 57 s before the log-probs and 73 s before the update, of 256 ranks."""
    rates = load_constants().rates("ascend")
    shape = replace(run_called("cann, random weights").shape, dispatch="controller")
    assert sum(dispatch_seconds(shape, rates, is_update=False).values()) == pytest.approx(57, rel=0.05)
    assert sum(dispatch_seconds(shape, rates, is_update=True).values()) == pytest.approx(73, rel=0.05)


@pytest.mark.parametrize(("tp", "ep", "world", "published_s"), [(8, 8, 128, 120), (1, 16, 256, 80)])
def test_gathering_tensor_by_tensor_takes_what_is_published(tp: int, ep: int, world: int, published_s: float) -> None:
    """verl issue 5311."""
    shape = run_called("verl, 96 H20").shape
    layout = ParallelLayout(
        world_size=world,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=16,
        expert_model_parallel_size=ep,
        num_layers_in_first_pipeline_stage=3,
        num_layers_in_last_pipeline_stage=2,
    )
    moved = weight_sync_seconds(
        replace(shape, train=replace(shape.train, layout=layout)), load_constants().rates("cuda")
    )
    assert sum(moved.values()) == pytest.approx(published_s, rel=0.05)
