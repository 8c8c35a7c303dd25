"""Where the recipes' data sets and weights are published: a row for each name of ``python -m tools.download``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """One published data set or model.

    Attributes:
        what: in a few words.
        size: of the download where it matters for the disk, rounded.
        huggingface: repository there.
        modelscope: repository there; None where none is known.
        use: the line that uses it; ``{dir}`` is the folder.
        patterns: files that are wanted of the Hugging Face repository; None means all.
        is_dataset: False for a model.
    """

    what: str
    size: str
    huggingface: str
    modelscope: str | None
    use: str
    patterns: tuple[str, ...] | None = None
    is_dataset: bool = True


def _model(what: str, size: str, repo_id: str, script: str, config: str = "") -> Source:
    use = f"{config}MODEL_PATH={{dir}} bash {script}"
    return Source(what, size, repo_id, repo_id, use, is_dataset=False)


_R1_ZERO = "recipes/r1_zero/ray_start_grpo_npu.sh"
_MATH = "recipes/math_lighteval/run_mcore_deepseek_verl.sh"
_DAPO = "recipes/dapo_qwen3_moe/run_dapo_qwen3_moe_30b_megatron_npu.sh"
_R1 = "recipes/r1_dynamic_sampling/run_deepseek_r1.sh"

SOURCES = {
    "deepscaler": Source(
        "about 40,000 problems, r1_zero's",
        "small",
        "agentica-org/DeepScaleR-Preview-Dataset",
        "agentica-org/DeepScaleR-Preview-Dataset",
        f"JSON_PATH={{dir}}/deepscaler.json bash {_R1_ZERO}",
        ("deepscaler.json",),
    ),
    "math-lighteval": Source(
        "12,500 problems, math_lighteval's",
        "small",
        "DigitalLearningGmbH/MATH-lighteval",
        "AI-ModelScope/MATH-lighteval",
        f"INPUT_DIR={{dir}} bash {_MATH}",
        ("data/*.parquet",),
    ),
    "gsm8k": Source(
        "8,792 school problems",
        "small",
        "openai/gsm8k",
        "AI-ModelScope/gsm8k",
        f"INPUT_DIR={{dir}}/main bash {_MATH}",
        ("main/*.parquet",),
    ),
    "dapo-math-17k": Source(
        "17k problems 100 times as verl's rows",
        "small",
        "BytedTsinghua-SIA/DAPO-Math-17k",
        None,
        f"INPUT_DIR={{dir}} bash {_DAPO} (with aime-2024 in the same folder)",
        ("data/*.parquet",),
    ),
    "dapo-math-17k-jsonl": Source(
        "the same as slime's JSON lines",
        "small",
        "zhuzilin/dapo-math-17k",
        None,
        f"PROMPT_DATA={{dir}}/dapo-math-17k.jsonl bash {_R1}",
        ("*.jsonl",),
    ),
    "aime-2024": Source(
        "30 problems 32 times as verl's rows",
        "small",
        "BytedTsinghua-SIA/AIME-2024",
        None,
        f"INPUT_DIR={{dir}} bash {_DAPO} (with dapo-math-17k in the same folder)",
        ("data/*.parquet",),
    ),
    "aime-2024-jsonl": Source(
        "the same as slime's JSON lines",
        "small",
        "zhuzilin/aime-2024",
        None,
        f"EVAL_PROMPT_DATA='aime {{dir}}/aime-2024.jsonl' bash {_R1}",
        ("*.jsonl",),
    ),
    "deepseek-v3-base": _model("671B base weights, FP8", "690 GB", "deepseek-ai/DeepSeek-V3-Base", _R1_ZERO),
    "deepseek-v3": _model("671B chat weights, FP8", "690 GB", "deepseek-ai/DeepSeek-V3", _R1_ZERO),
    "deepseek-v3-0324": _model("671B chat weights, FP8", "690 GB", "deepseek-ai/DeepSeek-V3-0324", _MATH),
    "deepseek-r1": _model("671B reasoning weights, FP8", "690 GB", "deepseek-ai/DeepSeek-R1", _R1),
    "moonlight": _model(
        "16B-A3B base weights, BF16", "32 GB", "moonshotai/Moonlight-16B-A3B", _MATH, "CONFIG_NAME=moonlight_16b_8gpu "
    ),
}
