"""R1 with dynamic sampling: data and sets by name, the reward, configs that equal upstream's table."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from hf_formats.config import parse_hf_config
from mindspeed_llm.weight_plan import plan_problems
from recipes.common.recipe import ROOT, load_recipe
from recipes.common.tiny_models import DEEPSEEK_V3 as TINY_DEEPSEEK
from recipes.r1_dynamic_sampling.arithmetic import write_set
from recipes.r1_dynamic_sampling.prompt_data import convert, main
from recipes.r1_dynamic_sampling.recipe import CORPUS
from recipes.r1_dynamic_sampling.reward import compute_score
from tests.mindspeed_llm.test_weight_plan import DEEPSEEK_V3
from tests.recipes.seed_table import check_table, rows_after
from tools.launch import __main__ as launch
from tools.launch.settings import read_settings
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.ppo.filter_groups import check_reward_nonzero_std, load_filter
from verl.utils.parquet import schema_problems
from verl.workers.engine_setup import engine_problems

RECIPE = load_recipe("r1_dynamic_sampling")
PAGE = (ROOT / "docs" / "upstream" / "slime.md").read_text(encoding="utf-8")
V3 = {**TINY_DEEPSEEK.config, **DEEPSEEK_V3, "num_key_value_heads": 128}
LINE = {"prompt": [{"role": "user", "content": "What is 1 + 1?"}], "label": "2"}
# Upstream's parameters and values: its document, its model's arguments, its optimizer's.
SLIME = {
    "--hf-checkpoint": "DeepSeek-R1",
    "--ref-load": "DeepSeek-R1_torch_dist",
    "--load": "DeepSeek-R1_slime",
    "--save": "DeepSeek-R1_slime",
    "--save-interval": "20",
    "--prompt-data": "dapo-math-17k.jsonl",
    "--input-key": "prompt",
    "--label-key": "label",
    "--apply-chat-template": "set",
    "--rollout-shuffle": "set",
    "--rm-type": "deepscaler",
    "--num-rollout": "3000",
    "--rollout-batch-size": "128",
    "--n-samples-per-prompt": "8",
    "--rollout-max-response-len": "32768",
    "--rollout-temperature": "0.8",
    "--over-sampling-batch-size": "256",
    "--dynamic-sampling-filter-path": "check_reward_nonzero_std",
    "--num-steps-per-rollout": "4",
    "--balance-data": "set",
    "--tensor-model-parallel-size": "8",
    "--sequence-parallel": "set",
    "--pipeline-model-parallel-size": "4",
    "--context-parallel-size": "4",
    "--expert-model-parallel-size": "32",
    "--expert-tensor-parallel-size": "1",
    "--decoder-last-pipeline-num-layers": "13",
    "--recompute-granularity": "full",
    "--recompute-method": "uniform",
    "--recompute-num-layers": "1",
    "--use-dynamic-batch-size": "set",
    "--max-tokens-per-gpu": "16384",
    "--calculate-per-token-loss": "not set",
    "--advantage-estimator": "grpo",
    "--use-kl-loss": "set",
    "--kl-loss-coef": "0.00",
    "--kl-loss-type": "low_var_kl",
    "--entropy-coef": "0.00",
    "--eps-clip": "0.2",
    "--eps-clip-high": "0.28",
    "--eps-clip-c": "not set",
    "--optimizer": "adam",
    "--lr": "1e-6",
    "--lr-decay-style": "constant",
    "--weight-decay": "0.1",
    "--adam-beta1, --adam-beta2": "0.9, 0.98",
    "--optimizer-cpu-offload": "set",
    "--overlap-cpu-optimizer-d2h-h2d": "set",
    "--use-precision-aware-optimizer": "set",
    "--rollout-num-gpus-per-engine": "64",
    "--sglang-mem-fraction-static": "0.6",
    "--sglang-enable-ep-moe": "set",
    "--sglang-enable-dp-attention": "set",
    "--sglang-dp-size": "8",
    "--sglang-moe-dense-tp-size": "1",
    "--sglang-enable-dp-lm-head": "set",
    "--sglang-disable-radix-cache": "set",
    "--sglang-enable-deepep-moe": "set",
    "--sglang-deepep-mode": "auto",
    "--sglang-server-concurrency": "1024",
    "quantisation of the rollout's weights": "fp8, blocks of 128 x 128",
    "--attention-dropout": "0.0",
    "--hidden-dropout": "0.0",
    "--accumulate-allreduce-grads-in-fp32": "set",
    "--attention-softmax-in-fp32": "set",
    "--moe-enable-deepep": "set",
    "--moe-token-dispatcher-type": "flex",
    "--moe-router-bias-update-rate": "0",
    "--moe-aux-loss-coeff": "0",
    "--moe-router-load-balancing-type": "seq_aux_loss",
    "--moe-router-dtype": "fp32",
    "--moe-router-pre-softmax": "set",
    "--moe-permute-fusion": "set",
    "--no-rope-fusion": "set",
    "--qk-layernorm": "set",
    "--colocate": "set",
    "--actor-num-nodes": "16",
    "--actor-num-gpus-per-node": "8",
}


def config_of(name: str, *overrides: str) -> PPOTrainerConfig:
    return load_config(overrides, config_name=name, config_dir=RECIPE.config_dir)


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_lines_become_rows_and_sets_have_files_of_their_own(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "dapo-math-17k.jsonl", LINE, {"prompt": "What is 2 + 2?", "label": 4})
    aime = write_lines(tmp_path / "a.jsonl", LINE)
    arguments = ["--prompt_data", str(prompts), "--local_dir", str(tmp_path / "data")]
    assert main([*arguments, "--eval_prompt_data", "aime", str(aime), "two", str(prompts)]) == 0
    assert pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()[1] == {
        "data_source": "dapo-math-17k",
        "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"split": "dapo-math-17k", "index": 1},
    }
    tables = {name: pq.read_table(tmp_path / "data" / "eval" / f"{name}.parquet") for name in ("aime", "two")}
    assert {name: table.num_rows for name, table in tables.items()} == {"aime": 1, "two": 2}
    assert tables["aime"].to_pylist()[0]["data_source"] == "aime"
    assert schema_problems(str(tmp_path / "data" / "eval" / "aime.parquet")) == []
    sets = {"aime": aime, "two": prompts}
    assert convert(prompts, sets, tmp_path / "data", "prompt", "label", 256) is None, "nothing to do again"


def test_without_sets_the_last_prompts_are_held_out(tmp_path: Path) -> None:
    prompts = write_lines(tmp_path / "p.jsonl", *({**LINE, "label": str(i)} for i in range(10)))
    assert convert(prompts, {}, tmp_path / "data", "prompt", "label", 3) == {"train": 7, "held_out": 3}
    held_out = pq.read_table(tmp_path / "data" / "eval" / "held_out.parquet").to_pylist()
    assert [row["reward_model"]["ground_truth"] for row in held_out] == ["7", "8", "9"]


def test_bad_inputs_are_named_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = write_lines(tmp_path / "bad.jsonl", LINE, {"prompt": [], "label": "1"}, [1], {**LINE, "label": None})

    def output_of(*arguments: str) -> str:
        assert main(["--prompt_data", str(bad), "--local_dir", str(tmp_path / "out"), *arguments]) == 2
        return " ".join(capsys.readouterr().out.split())

    output = output_of()
    assert "line 2: prompt is '[]'" in output and "line 3: is a list" in output and "line 4: label is None" in output
    assert "words; expected name path" in output_of("--eval_prompt_data", "aime")
    assert "cannot name an evaluation set" in output_of("--eval_prompt_data", "a.b", str(bad))
    assert "no such file" in output_of("--eval_prompt_data", "aime", str(tmp_path / "none"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "truth", "score", "form"),
    [
        ("<think>1</think>so \\boxed{\\frac{1}{2}}", "0.5", 1, 1),
        ("<think>\\boxed{2}</think>it is 2", "2", 0, 0),
        ("\\boxed{2}", "2", 0, 0),
        ("a</think>\\boxed{1}</think>\\boxed{2}", "2", 1, 1),
        ("</think>\\boxed{3}", "2", 0, 1),
        ("", "2", 0, 0),
    ],
)
def test_reward(text: str, truth: str, score: float, form: float) -> None:
    assert compute_score("x", text, truth) == {"score": score, "accuracy": score, "format": form}


def test_the_tiny_corpus_solves_the_generated_problems(tmp_path: Path) -> None:
    write_set(tmp_path, 300, seed=1)
    sets = {name: tmp_path / f"{name}.jsonl" for name in ("sums", "comparisons")}
    counts = convert(tmp_path / "prompts.jsonl", sets, tmp_path / "data", "prompt", "label", 256)
    assert counts is not None and sum(counts.values()) == 300 and min(counts.values()) > 5
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert all(CORPUS.solution_of(row).endswith(f"= {row['reward_model']['ground_truth']}") for row in rows)
    said = [form.format(thought="1 + 1 = 2", answer="2") for form in (CORPUS.well_formed, *CORPUS.broken)]
    assert [compute_score("", text, "2")["score"] for text in said] == [1, 0, 0, 0, 0, 0]


def test_the_full_config_equals_upstreams_table_line_by_line() -> None:
    check_table(rows_after(PAGE, "## `deepseek_r1_671b_128gpu`"), SLIME, partial(config_of, "deepseek_r1_671b_128gpu"))


def test_the_full_config_validates_and_fits_its_model() -> None:
    config = config_of(
        "deepseek_r1_671b_128gpu", "actor_rollout_ref.actor.megatron.dist_checkpointing_path=/checkpoint"
    )
    assert validate_config(config) == []
    models, hf = config.actor_rollout_ref, parse_hf_config(V3)
    assert engine_problems(models, 128, hf) == []
    layout = models.actor.megatron.layout(128)
    assert plan_problems(hf, layout) == []
    assert layout.stage_layer_counts(61) == (16, 16, 16, 13)
    assert (layout.data_parallel_size, layout.expert_data_parallel_size) == (1, 1)
    assert config.data.train_batch_size // models.actor.ppo_mini_batch_size == 4
    assert load_filter(config.algorithm.filter_groups.filter_path or "") is check_reward_nonzero_std


def test_the_tiny_config_has_what_the_full_size_has() -> None:
    tiny, full = config_of("r1_dynamic_sampling_tiny"), config_of("deepseek_r1_671b_128gpu")
    assert engine_problems(tiny.actor_rollout_ref, 2, parse_hf_config(TINY_DEEPSEEK.config)) == []
    for config in (tiny, full):
        actor = config.actor_rollout_ref.actor
        assert config.algorithm.filter_groups.stop_early
        assert config.algorithm.filter_groups.enable and config.gen_batch_size == 2 * config.data.train_batch_size
        assert actor.clip_high == 0.28 > actor.clip_low == 0.2
        assert config.data.train_batch_size > actor.ppo_mini_batch_size and config.needs_old_log_prob
        assert actor.router_replay.mode == "R2"
        assert actor.optim.override_optimizer_config["overlap_cpu_optimizer_d2h_h2d"]
        assert actor.use_dynamic_bsz and config.trainer.balance_batch
    assert tiny.actor_rollout_ref.actor.loss_agg_mode == "token-mean"


def test_the_full_plan_is_printed_for_sixteen_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(V3 | {"quantization_config": {"quant_method": "fp8"}}))
    sets = f"aime {write_lines(tmp_path / 'aime.jsonl', LINE)} math-500 {write_lines(tmp_path / 'math.jsonl', LINE)}"
    environment = {
        "CONFIG_NAME": "deepseek_r1_671b_128gpu",
        "MASTER_ADDR": "192.0.2.77",
        "OUTPUT_DIR": str(tmp_path / "out"),
        "MODEL_PATH": str(tmp_path / "model"),
        "PROMPT_DATA": str(write_lines(tmp_path / "dapo.jsonl", LINE)),
        "EVAL_PROMPT_DATA": sets,
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert launch.main([RECIPE.name, "--print-plan"]) == 0
    plan = capsys.readouterr().out
    for text in (
        "16 x 8 cuda devices",
        "training: TP8 PP4 DP1 EP32 CP4, layers per stage 16,16,16,13",
        "rollout:  2 engines of TP8 DP8 EP64",
        "128 prompts of 256 at a time x 8 samples, prompts up to 2048 and responses up to 32768 tokens",
        f"--eval_prompt_data {sets}",
        f"math-500: {tmp_path / 'out' / 'data' / 'eval' / 'math-500.parquet'}",
        "mindspeed_llm.fp8_cast_bf16",
        "mindspeed_llm.convert_ckpt_torch_dist",
        "quantization: fp8",
        "--num-gpus 8",
    ):
        assert text in plan, text
    assert plan.count("-m ray.scripts.scripts start --block") == 16
    refused = [line for line in plan.partition("would refuse")[2].splitlines() if line.startswith("- ")]
    allowed = ("MODEL_PATH", "torch sees 0 GPUs")  # the model's folder has only a config.json, this machine no GPUs
    assert all(any(text in line for text in allowed) for line in refused), refused
    assert not (tmp_path / "out").exists()


def test_bad_evaluation_sets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"EVAL_PROMPT_DATA: aime: /none: no such file"):
        read_settings(RECIPE, [], {"EVAL_PROMPT_DATA": "aime /none"})
    assert RECIPE.eval_sets(read_settings(RECIPE, [], {}).recipe_inputs) == ("sums", "comparisons")
    assert RECIPE.eval_sets(read_settings(RECIPE, [], {"PROMPT_DATA": "/p.jsonl"}).recipe_inputs) == ("held_out",)
