"""DAPO of Qwen3-MoE: the published rows, the reward, configs that equal upstream's script line by line."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hf_formats.config import load_hf_config, parse_hf_config
from mindspeed_llm.weight_plan import plan_problems
from recipes.common.recipe import ROOT, load_recipe
from recipes.common.tiny_models import QWEN3_MOE
from recipes.dapo_qwen3_moe.arithmetic import AFTER, BEFORE, published_row, write_set
from recipes.dapo_qwen3_moe.dapo_math import FORM, main
from recipes.dapo_qwen3_moe.recipe import CORPUS
from recipes.dapo_qwen3_moe.reward import compute_score
from tests.recipes.seed_table import check_table, rows_after
from tests.recipes.test_math_answers import REAL_DATA
from tests.verl.test_upstream_scripts import script_arguments
from tools.launch import __main__ as launch
from tools.plan.setup import MODELS
from verl.trainer.command_line import read_command_line
from verl.trainer.config import PPOTrainerConfig, compose_config, load_config, resolve_config, validate_config
from verl.utils.parquet import schema_problems
from verl.workers.engine_setup import engine_problems

RECIPE = load_recipe("dapo_qwen3_moe")
PAGE = (ROOT / "docs" / "upstream" / "dapo_qwen3_moe.md").read_text(encoding="utf-8")
SCRIPT = "dapo_qwen3_moe_30b_npu"
SMALL, LARGE = "qwen3_30b_a3b_16die", "qwen3_235b_a22b_64die"
MODEL_OF = {SMALL: "qwen3_30b_a3b", LARGE: "qwen3_235b_a22b"}
# As the data set is published: the index is a text, and the style one of a grader that nothing here reads.
ROW = published_row("What is $1+1$?", "2") | {
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}


def config_of(name: str, *overrides: str) -> PPOTrainerConfig:
    return load_config(overrides, config_name=name, config_dir=RECIPE.config_dir)


def write_lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_published(folder: Path) -> Path:
    """Both files where ``tools.download`` puts them; AIME's rows stand there several times."""
    (folder / "data").mkdir(parents=True)
    for name, rows in (("dapo-math-17k", [ROW, ROW]), ("aime-2024", [ROW | {"data_source": "aime_2024"}] * 3)):
        pq.write_table(pa.Table.from_pylist(rows), folder / "data" / f"{name}.parquet")
    return folder


def test_published_files_become_both_sides(tmp_path: Path) -> None:
    folder, out = write_published(tmp_path / "in"), tmp_path / "out"
    write_lines(folder / "train.jsonl", [1])  # not read beside the published file
    assert main(argv=["--input_dir", str(folder), "--local_dir", str(out)]) == 0
    assert pq.read_table(out / "train.parquet").to_pylist()[1] == {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"{BEFORE}What is $1+1$?{AFTER}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"split": "train", "index": 1},
    }
    assert pq.read_table(out / "test.parquet")["data_source"].to_pylist() == ["aime_2024"] * 3
    assert schema_problems(str(out / "train.parquet")) == []
    assert FORM.convert(folder, out) is None, "a second run has nothing to do"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1], "is a list"),
        ({**ROW, "data_source": None}, "data_source is None"),
        ({**ROW, "prompt": "1 + 1?"}, "prompt is '1 + 1?'"),
        ({**ROW, "prompt": [{"role": "user", "content": " "}]}, "expected messages of role and content"),
        ({**ROW, "reward_model": {"style": "rule"}}, "expected the answer as its ground_truth"),
        ({**ROW, "reward_model": {"ground_truth": True}}, "expected the answer as its ground_truth"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: Any, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_lines(tmp_path / "dapo-math-17k.jsonl", ROW, row)
    write_lines(tmp_path / "aime-2024.jsonl", ROW)
    assert main(argv=["--input_dir", str(tmp_path), "--local_dir", str(tmp_path / "out")]) == 2
    output = capsys.readouterr().out
    assert "dapo-math-17k.jsonl: row 1: " in output and expected in output
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_side_is_refused(tmp_path: Path) -> None:
    write_lines(tmp_path / "dapo-math-17k.jsonl", ROW)
    with pytest.raises(ValueError, match=r"no aime-2024\*\.parquet and no aime-2024\*\.jsonl there; expected a folder"):
        RECIPE.check_input(tmp_path)


def test_real_problems_are_read_and_their_answers_are_right(tmp_path: Path) -> None:
    """Of published competition problems, whose answers are integers as those of AIME, none is graded as wrong."""
    file = REAL_DATA / "deepscaler_math_aime.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there: no real problems are converted")
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = [published_row(row["problem"], row["answer"]) for row in found if (row["answer"] or "").strip().isdigit()]
    write_lines(tmp_path / "dapo-math-17k.jsonl", *rows)
    write_lines(tmp_path / "aime-2024.jsonl", *rows[:30])
    assert FORM.convert(tmp_path, tmp_path / "out") == {"train": len(rows), "test": 30} and len(rows) > 5000
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    assert all(compute_score("math_dapo", f"so\nAnswer: {truth}", truth)["score"] == 1 for truth in truths)
    assert not any(compute_score("math_dapo", f"so\nAnswer: {truth}7", truth)["acc"] for truth in truths)


@pytest.mark.parametrize(
    ("text", "right", "answered"),
    [
        ("1 + 1 = 2\nAnswer: 2", 1, 1),
        ("Answer: $2$", 1, 1),
        ("answer : \\boxed{2}.", 1, 1),  # upstream's compares the full stop too
        ("Answer: 3\nAnswer: 2", 1, 1),
        ("Answer: 2\nAnswer: 3", 0, 1),
        ("The answer is 2.", 0, 0),
        ("so \\boxed{2}", 0, 0),
        ("Answer: 2" + "." * 300, 0, 0),
        ("", 0, 0),
    ],
)
def test_reward(text: str, right: float, answered: float) -> None:
    assert compute_score("math_dapo", text, "2") == {"score": 2 * right - 1, "acc": right, "answered": answered}


def test_the_tiny_corpus_solves_the_generated_problems(tmp_path: Path) -> None:
    write_set(tmp_path, 300, seed=1)
    assert FORM.convert(tmp_path, tmp_path / "data") == {"train": 270, "test": 30}
    rows = pq.read_table(tmp_path / "data" / "train.parquet").to_pylist()
    assert all(CORPUS.solution_of(row).endswith(f"= {row['reward_model']['ground_truth']}") for row in rows)
    said = [form.format(thought="1 + 1 = 2", answer="2") for form in (CORPUS.well_formed, *CORPUS.broken)]
    assert [compute_score("", text, "2")["acc"] for text in said] == [1, 0, 0, 0, 0]


def upstreams_settings() -> dict[str, str]:
    """Every key of upstream's script with its value as the script has it."""
    pairs = (text.lstrip("+").partition("=") for text in script_arguments(SCRIPT) if not text.startswith("--"))
    return {key: value for key, _, value in pairs}


def test_the_full_config_equals_upstreams_script_line_by_line() -> None:
    check_table(rows_after(PAGE, f"## `{SMALL}`"), upstreams_settings(), partial(config_of, SMALL))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return found


def test_nothing_else_differs_from_what_upstreams_command_resolves_to() -> None:
    """Over the same defaults: those that the page lists and two more of which it speaks."""
    args = read_command_line(script_arguments(SCRIPT))
    assert args.config_name == "dapo_megatron_trainer"
    theirs = flat(asdict(resolve_config(compose_config(["reward_model.reward_manager=dapo", *args.overrides]))[0]))
    ours = flat(asdict(config_of(SMALL)))
    differing = {key for key in {*theirs, *ours} if theirs.get(key) != ours.get(key)}
    named = {
        row.key.removesuffix(" *") for row in rows_after(PAGE, f"## `{SMALL}`") if row.note or row.key.endswith("*")
    }
    experts = {f"actor_rollout_ref.{part}.megatron.expert_tensor_parallel_size" for part in ("actor", "ref")}
    experts |= {"actor_rollout_ref.rollout.expert_exchange"}
    assert differing - named == experts | {"trainer.report_dir"}
    assert all(f"`{name}`" in PAGE for name in ("expert_tensor_parallel_size", "expert_exchange"))


@pytest.mark.parametrize(("name", "layers"), [(SMALL, (24, 24)), (LARGE, (11, *[12] * 6, 11))])
def test_the_full_configs_validate_and_fit_their_models(name: str, layers: tuple[int, ...]) -> None:
    config = config_of(name, "actor_rollout_ref.actor.megatron.dist_checkpointing_path=/checkpoint")
    assert validate_config(config) == []
    hf = load_hf_config(str(MODELS / MODEL_OF[name]))
    world_size = config.trainer.world_size
    assert engine_problems(config.actor_rollout_ref, world_size, hf) == []
    layout = config.actor_rollout_ref.actor.megatron.layout(world_size)
    assert plan_problems(hf, layout) == []
    assert layout.stage_layer_counts(hf.num_hidden_layers) == layers and layout.data_parallel_size == 2


def test_the_tiny_config_has_what_the_full_size_has() -> None:
    tiny, full = config_of("dapo_qwen3_moe_tiny"), config_of(SMALL)
    assert engine_problems(tiny.actor_rollout_ref, 2, parse_hf_config(QWEN3_MOE.config)) == []
    for config in (tiny, full):
        actor, filtered, buffer = (
            config.actor_rollout_ref.actor,
            config.algorithm.filter_groups,
            config.reward_model.overlong_buffer,
        )
        assert config.gen_batch_size == 2 * config.data.train_batch_size > 2 * actor.ppo_mini_batch_size
        assert (filtered.enable, filtered.metric, filtered.max_num_gen_batches) == (True, "acc", 10)
        assert (actor.clip_low, actor.clip_high, actor.clip_ratio_c) == (0.2, 0.28, 10.0)
        assert (actor.loss_agg_mode, actor.use_kl_loss, actor.use_dynamic_bsz) == ("token-mean", False, True)
        assert config.reward_model.reward_manager == "dapo" and buffer.enable and buffer.penalty_factor == 1.0
        engine = actor.megatron
        assert engine.expert_tensor_parallel_size == engine.tensor_model_parallel_size > 1
        assert engine.param_offload and engine.grad_offload and engine.optimizer_offload
        assert config.actor_rollout_ref.rollout.tensor_model_parallel_size == 2


def test_the_full_plan_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {
        "CONFIG_NAME": SMALL,
        "OUTPUT_DIR": str(tmp_path / "out"),
        "MODEL_PATH": str(MODELS / MODEL_OF[SMALL]),
        "INPUT_DIR": str(write_published(tmp_path / "in")),
    }
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    assert launch.main([RECIPE.name, "--print-plan"]) == 0
    plan = capsys.readouterr().out
    for text in (
        "1 x 16 npu devices",
        "training: TP4 PP2 DP2 EP2 ETP4",
        "rollout:  TP2 DP8 EP16",
        "16 prompts of 32 at a time x 16 samples, prompts up to 2048 and responses up to 20480 tokens",
        f"recipes.dapo_qwen3_moe.dapo_math --input_dir {tmp_path / 'in'}",
        "mindspeed_llm.convert_ckpt_torch_dist",
    ):
        assert text in plan, text
    assert not (tmp_path / "out").exists()
