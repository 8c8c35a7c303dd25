"""MATH-lighteval: rows in upstream's schema, a reward that counts boxes, configs that equal upstream's table."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hf_formats.config import parse_hf_config
from mindspeed_llm.weight_plan import local_plan, plan_problems
from recipes.common import arithmetic
from recipes.common.corpus import examples
from recipes.common.recipe import ROOT, load_recipe
from recipes.common.tiny_models import DEEPSEEK_V3 as TINY_DEEPSEEK
from recipes.math_lighteval.arithmetic import write_set
from recipes.math_lighteval.math_lighteval import DATA_SOURCE, INSTRUCTION, convert, main
from recipes.math_lighteval.recipe import CORPUS
from recipes.math_lighteval.reward import compute_score
from tests.mindspeed_llm.test_weight_plan import DEEPSEEK_V3
from tests.recipes.seed_table import rows_after
from tools.launch import __main__ as launch
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.utils.parquet import schema_problems
from verl.workers.engine_setup import engine_problems

RECIPE = load_recipe("math_lighteval")
PAGE = (ROOT / "docs" / "upstream" / "pai_math_lighteval.md").read_text(encoding="utf-8")
V3 = {**TINY_DEEPSEEK.config, **DEEPSEEK_V3, "num_key_value_heads": 128}
MOONLIGHT = {
    **TINY_DEEPSEEK.config,
    "vocab_size": 163840,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_scaling": None,
}
ROW = {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{2}$."}


def write_rows(folder: Path, side: str, rows: list[Any], kind: str = "jsonl") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{side}-00000-of-00001.parquet")
    else:
        (folder / f"{side}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("inner", ["", "data"])
def test_rows_have_upstreams_schema(tmp_path: Path, kind: str, inner: str) -> None:
    for side in ("train", "test"):
        write_rows(
            tmp_path / inner, side, [ROW, {**ROW, "solution": "$\\boxed{\\frac{1}{2}}$, no, $\\boxed{3}$"}], kind
        )
    assert main(["--input_dir", str(tmp_path), "--local_dir", str(tmp_path)]) == 0
    table = pq.read_table(tmp_path / "train.parquet")
    assert table.to_pylist()[0] == {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": "What is $1+1$?" + INSTRUCTION}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 0},
        "level": "Level 1",
        "type": "Algebra",
    }
    assert table.to_pylist()[1]["reward_model"]["ground_truth"] == "3"
    assert schema_problems(str(tmp_path / "test.parquet")) == []
    assert convert(tmp_path, tmp_path) is None, "a second run, over its own output, has nothing to do"
    assert INSTRUCTION == " Let's think step by step and output the final answer within \\boxed{}."


def test_real_word_problems_are_read(tmp_path: Path) -> None:
    data = ROOT.parent / "shared" / "data"
    if not (data / "gsm8k_train.jsonl").is_file():
        pytest.skip(f"{data} has no GSM8K: real rows are not converted")
    assert convert(data, tmp_path) == {"train": 7473, "test": 1319}
    row = pq.read_table(tmp_path / "train.parquet").slice(0, 1).to_pylist()[0]
    assert (row["data_source"], row["reward_model"]["ground_truth"], row["level"]) == ("openai/gsm8k", "72", None)
    assert row["prompt"][0]["content"].startswith("Natalia sold") and row["prompt"][0]["content"].endswith(INSTRUCTION)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**ROW, "solution": "two"}, "no final answer"),
        ({**ROW, "solution": "$\\boxed{2"}, "no final answer"),
        ({**ROW, "problem": None}, "problem is empty or no text"),
        ({"problem": "x"}, "solution is missing"),
        ([1], "is a list"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(
    tmp_path: Path, row: Any, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(tmp_path, "train", [ROW, row, ROW, row])
    write_rows(tmp_path, "test", [ROW])
    assert main(["--input_dir", str(tmp_path), "--local_dir", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().out
    for position in (1, 3):
        assert f"train.jsonl: row {position}: " in output
    assert expected in output
    assert not (tmp_path / "out").exists()


def test_bad_inputs_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def output_of(folder: Path, local: Path = tmp_path / "out") -> str:
        assert main(["--input_dir", str(folder), "--local_dir", str(local)]) == 2
        return " ".join(capsys.readouterr().out.split())

    assert "no such folder" in output_of(tmp_path / "none")
    write_rows(tmp_path, "train", [ROW])
    assert "no test*.parquet" in output_of(tmp_path)
    (tmp_path / "test.jsonl").write_text("{\n")
    assert "test.jsonl: row 0 is no JSON object" in output_of(tmp_path)
    (tmp_path / "test.jsonl").unlink()
    (tmp_path / "test.parquet").write_text("no parquet")
    assert "test.parquet is not a readable parquet file" in output_of(tmp_path)
    pq.write_table(pa.table({"problem": ["x"]}), tmp_path / "test.parquet")
    assert "has the columns problem; expected problem and solution or" in output_of(tmp_path)
    assert "would be replaced; choose another folder" in output_of(tmp_path, tmp_path)


def test_the_launcher_names_a_bad_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTPUT_DIR", str(tmp_path / "out"))
    monkeypatch.setenv("INPUT_DIR", str(tmp_path / "none"))
    assert launch.main(["math_lighteval"]) == launch.BAD_INPUT
    assert f"INPUT_DIR {tmp_path / 'none'}: no such folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "truth", "score", "boxed"),
    [
        ("so $\\boxed{\\frac{1}{2}}$", "0.5", 1, 1),
        ("\\boxed{1} then \\boxed{2}", "2", 1, 1),
        ("\\boxed{1} then \\boxed{2}", "1", 0, 1),
        ("the answer is 2", "2", 0, 0),
        ("\\boxed{2", "2", 0, 0),
        ("", "2", 0, 0),
    ],
)
def test_reward(text: str, truth: str, score: float, boxed: float) -> None:
    assert compute_score(DATA_SOURCE, text, truth) == {"score": score, "accuracy": score, "boxed": boxed}


def test_the_tiny_corpus_solves_the_generated_problems(tmp_path: Path) -> None:
    write_set(tmp_path, 300, seed=1)
    assert convert(tmp_path, tmp_path / "data") == {"train": 270, "test": 30}
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    truths = {row["prompt"][0]["content"]: row["reward_model"]["ground_truth"] for row in rows}
    assert all(CORPUS.solution_of(row).endswith(f"= {truths[row['prompt'][0]['content']]}") for row in rows)
    assert arithmetic.solution_of("What is the meaning of 4 and 2?") == ""
    read = list(islice(examples(rows, 0, CORPUS), 2000))
    right = [compute_score("", one.response, truths[one.messages[0]["content"]])["score"] for one in read]
    assert 0.25 < sum(right) / len(right) < 0.4


def config_of(name: str, *overrides: str) -> PPOTrainerConfig:
    given = ["actor_rollout_ref.actor.megatron.dist_checkpointing_path=/checkpoint", *overrides]
    return load_config(given, config_name=name, config_dir=RECIPE.config_dir)


def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    inner = {f"{prefix}{key}.": value for key, value in section.items() if isinstance(value, dict)}
    found = {f"{prefix}{key}": value for key, value in section.items() if not isinstance(value, dict)}
    return found | {key: value for name, part in inner.items() for key, value in flat(part, name).items()}


@pytest.mark.parametrize(
    ("name", "heading", "least"),
    [
        ("deepseek_v3_671b_128gpu", "## `deepseek_v3_671b_128gpu`", 55),
        ("moonlight_16b_8gpu", "## `moonlight_16b_8gpu`", 8),
    ],
)
def test_configs_equal_upstreams_table_line_by_line(name: str, heading: str, least: int) -> None:
    resolved = asdict(config_of(name))
    rows = rows_after(PAGE, heading)
    assert len(rows) >= least
    for row in rows:
        dotted = row.key.removesuffix(" *")
        if row.key.endswith("*"):
            config_of(name, f"{dotted}={row.ours}")  # accepted; any other value is an error
            continue
        value: Any = resolved
        for part in dotted.split("."):
            value = value[part]
        assert value == yaml.safe_load(row.ours), dotted


@pytest.mark.parametrize(
    ("name", "dims"),
    [("deepseek_v3_671b_128gpu", V3), ("deepseek_v3_671b_128gpu_96gb", V3), ("moonlight_16b_8gpu", MOONLIGHT)],
)
def test_full_size_configs_validate_and_fit_their_models(name: str, dims: dict[str, Any]) -> None:
    config = config_of(name)
    assert validate_config(config) == []
    hf, world = parse_hf_config(dims), config.trainer.world_size
    assert engine_problems(config.actor_rollout_ref, world, hf) == []
    layout = config.actor_rollout_ref.actor.megatron.layout(world)
    assert plan_problems(hf, layout) == []
    assert layout.mla_down_proj_column_parallel
    if name.startswith("deepseek"):
        assert world == 128
        assert layout.stage_layer_counts(61) == (3, *[4] * 14, 2)
        assert (layout.data_parallel_size, layout.expert_data_parallel_size) == (2, 1)
        plan = {tensor.name: tensor.shape for tensor in local_plan(hf, layout, 0)}
        assert plan["decoder.layers.0.self_attention.linear_q_down_proj.weight"] == (1536 // 4, 7168)
        assert plan["decoder.layers.0.self_attention.linear_kv_down_proj.weight"] == (576 // 4, 7168)
        last = {tensor.name: tensor.shape for tensor in local_plan(hf, layout, 127)}
        assert last["decoder.layers.1.mlp.experts.weight1"] == (128, 7168, 2 * 2048 // 4)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "deepseek_v3_671b_128gpu_96gb",
            [
                "16 x 8 cuda devices",
                "training: TP4 PP16 DP2 EP2 ETP4, layers per stage 3,4,4,4,4,4,4,4,4,4,4,4,4,4,4,2",
                "rollout:  TP32 DP4",
                "128 prompts x 2 samples",
            ],
        ),
        ("moonlight_16b_8gpu", ["1 x 8 cuda devices", "training: TP2 PP1 DP4 EP8", "rollout:  TP1 DP8 EP8"]),
    ],
)
def test_full_size_plans_are_printed_for_their_node_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, expected: list[str]
) -> None:
    dims = V3 if name.startswith("deepseek") else MOONLIGHT
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(dims | {"quantization_config": {"quant_method": "fp8"}}))
    environment = {"CONFIG_NAME": name, "MASTER_ADDR": "192.0.2.77", "OUTPUT_DIR": str(tmp_path / "out")}
    for variable, value in (environment | {"MODEL_PATH": str(tmp_path / "model")}).items():
        monkeypatch.setenv(variable, value)
    assert launch.main(["math_lighteval", "--print-plan"]) == 0
    plan = capsys.readouterr().out
    for text in [*expected, "mindspeed_llm.fp8_cast_bf16", "mindspeed_llm.convert_ckpt_torch_dist", "--num-gpus 8"]:
        assert text in plan, text
    assert plan.count("-m ray.scripts.scripts start --block") == config_of(name).trainer.nnodes
    assert "convert_ckpt_deepseek3_mcore2hf" in plan
    assert not (tmp_path / "out").exists()


def test_the_default_on_gpus_differs_from_upstreams_where_96_gb_need_it() -> None:
    assert RECIPE.full_config == "deepseek_v3_671b_128gpu_96gb"
    small, upstream = (flat(asdict(config_of(f"deepseek_v3_671b_128gpu{size}"))) for size in ("_96gb", ""))
    assert {key for key in small.keys() | upstream.keys() if small.get(key) != upstream.get(key)} == {
        "actor_rollout_ref.actor.optim.override_optimizer_config.optimizer_cpu_offload",
        "actor_rollout_ref.actor.megatron.optimizer_offload",
        "actor_rollout_ref.ref.megatron.optimizer_offload",  # starts as a copy of the actor's
        *("trainer.experiment_name", "trainer.default_local_dir", "trainer.report_dir"),
    }


def test_tiny_config_validates_and_has_what_the_full_size_has() -> None:
    config = config_of("math_lighteval_tiny")
    assert validate_config(config) == []
    assert engine_problems(config.actor_rollout_ref, 2, parse_hf_config(TINY_DEEPSEEK.config)) == []
    layout = config.actor_rollout_ref.actor.megatron.layout(2)
    assert layout.mla_down_proj_column_parallel and layout.expert_tensor_parallel_size == 2
    assert config.actor_rollout_ref.model.freeze_moe_router
