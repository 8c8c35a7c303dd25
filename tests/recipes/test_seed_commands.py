"""The commands that the seeds' documents print: each has a counterpart that takes the same options."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from mindspeed_llm import convert_ckpt_deepseek3, convert_ckpt_torch_dist, fp8_cast_bf16
from recipes.common.recipe import ROOT
from recipes.math_lighteval import math_lighteval
from recipes.r1_zero import json_to_parquet
from tools import download

PAGES = ROOT / "docs" / "upstream"
# page -> the commands of its seed, as printed, and the entry point that stands for them.
PRINTED: dict[str, list[tuple[str, Callable[[list[str]], int]]]] = {
    "r1_ascend": [
        (
            "python recipe/r1_ascend/json_to_parquet.py --output_dir ./data/deepscaler --json_path "
            "path/to/deepscaler.json --train_data_ratio 0.9",
            json_to_parquet.main,
        )
    ],
    "cann_recipes": [
        (
            "python ./verl_patches/scripts/json_to_parquet.py --output_dir ./data/deepscaler --json_path "
            "./data/deepscaler/deepscaler.json",
            json_to_parquet.main,
        ),
        (
            "python verl_patches/scripts/fp8_cast_bf16.py --input-fp8-hf-path your_fp8_weights --output-bf16-hf-path "
            "your_bf16_weights",
            fp8_cast_bf16.main,
        ),
        (
            "python verl_patches/scripts/convert_ckpt_deepseek3.py --moe-grouped-gemm --target-tensor-parallel-size 4 "
            "--target-pipeline-parallel-size 8 --num-layer-list 7,7,8,8,8,8,8,7 --target-expert-parallel-size 8 "
            "--load-dir your_bf16_weights --save-dir your_sharded_weights --moe-tp-extend-ep --first-k-dense-replace 3 "
            "--num-layers 61",
            convert_ckpt_deepseek3.main,
        ),
    ],
    "pai_math_lighteval": [
        (
            "python math_lighteval.py --input_dir dataset/MATH-lighteval --local_dir dataset/MATH-lighteval",
            math_lighteval.main,
        ),
        (
            "python fp8_cast_bf16.py --input-fp8-hf-path DeepSeek-V3-0324 --output-bf16-hf-path DeepSeek-V3-0324-BF16",
            fp8_cast_bf16.main,
        ),
    ],
    "slime": [
        (
            "python fp8_cast_bf16.py --input-fp8-hf-path $BASE_DIR/DeepSeek-R1 --output-bf16-hf-path "
            "$BASE_DIR/DeepSeek-R1-bf16/",
            fp8_cast_bf16.main,
        )
    ],
}
# page -> arguments of run_32xH20.sh as printed, and what stands for the script.
CONVERSIONS = {
    "pai_math_lighteval": ("DeepSeek-V3-0324-BF16", "DeepSeek-V3-0324-BF16-to-mcore"),
    "slime": ("$BASE_DIR/DeepSeek-R1-bf16/", "$BASE_DIR/DeepSeek-R1_torch_dist/"),
}


@pytest.mark.parametrize(("page", "folders"), CONVERSIONS.items())
def test_the_printed_conversion_has_a_command_of_the_same_folders(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: str,
    folders: tuple[str, str],
) -> None:
    text = (PAGES / f"{page}.md").read_text(encoding="utf-8")
    source, target = folders
    assert f"bash scripts/deepseek_v3/run_32xH20.sh A37B {source} {target} false true bf16`" in text
    ours = f"python -m mindspeed_llm.convert_ckpt_torch_dist --load-dir {source} --save-dir {target}"
    assert f"`{ours}`" in text
    monkeypatch.chdir(tmp_path)
    assert convert_ckpt_torch_dist.main(shlex.split(ours.replace("$BASE_DIR", "base"))[3:]) in (1, 2)
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("page", "command", "main"), [(page, *item) for page, items in PRINTED.items() for item in items]
)
def test_a_printed_command_is_on_its_page_and_its_options_are_taken(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    page: str,
    command: str,
    main: Callable[[list[str]], int],
) -> None:
    """There is nothing to read where it runs, so that it ends with that and not with a word about its options."""
    assert f"| `{command}` |" in (PAGES / f"{page}.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command.replace("$BASE_DIR", "base"))[2:]) in (1, 2)
    told = capsys.readouterr()
    assert "unrecognized arguments" not in told.err and "usage:" not in told.err
    assert "does not exist" in told.out + told.err or "no " in told.out + told.err


# page -> the downloads of its seed, as printed, and ours.
DOWNLOADS: list[tuple[str, str, str]] = [
    (
        "cann_recipes",
        "modelscope download --dataset agentica-org/DeepScaleR-Preview-Dataset deepscaler.json --local_dir .",
        "python -m tools.download deepscaler --to . --source modelscope",
    ),
    (
        "cann_recipes",
        "modelscope download --model deepseek-ai/DeepSeek-V3 configuration_deepseek.py tokenizer.json "
        "tokenizer_config.json --local_dir ./DeepSeek-V3",
        "python -m tools.download deepseek-v3 --to ./DeepSeek-V3 --source modelscope --no-weights",
    ),
    (
        "cann_recipes",
        "modelscope download --model deepseek-ai/DeepSeek-V3 --local_dir your_fp8_weights",
        "python -m tools.download deepseek-v3 --to your_fp8_weights --source modelscope",
    ),
    (
        "pai_math_lighteval",
        "modelscope download --dataset AI-ModelScope/MATH-lighteval --local_dir dataset/MATH-lighteval",
        "python -m tools.download math-lighteval --to dataset/MATH-lighteval --source modelscope",
    ),
    (
        "pai_math_lighteval",
        "modelscope download --model deepseek-ai/DeepSeek-V3-0324 --local_dir DeepSeek-V3-0324",
        "python -m tools.download deepseek-v3-0324 --to DeepSeek-V3-0324 --source modelscope",
    ),
    (
        "slime",
        "huggingface-cli download deepseek-ai/DeepSeek-R1 --local-dir $BASE_DIR/DeepSeek-R1",
        "python -m tools.download deepseek-r1 --to $BASE_DIR/DeepSeek-R1",
    ),
]


@pytest.mark.parametrize(("page", "theirs", "ours"), DOWNLOADS)
def test_a_printed_download_is_ours_of_the_same_repository_into_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, theirs: str, ours: str
) -> None:
    assert f"| `{theirs}` | `{ours}` |" in (PAGES / f"{page}.md").read_text(encoding="utf-8")
    (tmp_path / "modelscope.py").touch()  # as if it were installed: it is no requirement
    monkeypatch.syspath_prepend(tmp_path)
    words, asked = shlex.split(theirs), download.read_request(download._parser().parse_args(shlex.split(ours)[3:]))
    assert asked.hub == ("modelscope" if words[0] == "modelscope" else "huggingface")
    assert asked.repo_id in words and asked.directory == Path(words[-1]).absolute()
    assert asked.source.is_dataset == ("--dataset" in words)
    files = [word for word in words if word.endswith(".json")]
    assert all(any(fnmatchcase(file, pattern) for pattern in asked.patterns or "*") for file in files)


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("r1_ascend", "seed_r1_ascend"),
        ("cann_recipes", "seed_cann_true_weight"),
        ("cann_recipes", "seed_cann_random_init"),
        ("pai_math_lighteval", "seed_pai_math_lighteval"),
    ],
)
def test_the_page_names_the_module_that_stands_for_the_seeds(page: str, name: str) -> None:
    """What the whole command resolves to: tests/verl/test_upstream_scripts.py."""
    lines = (ROOT / "tests" / "verl" / "upstream_scripts" / f"{name}.args").read_text(encoding="utf-8").splitlines()
    theirs = f"`python3 -m {lines[1]} {' '.join(lines[2:4])} ...`"
    ours = f"`python3 -m verl.trainer.main_ppo {' '.join(lines[2:4])} ...`"
    assert f"| {theirs} | {ours} |" in (PAGES / f"{page}.md").read_text(encoding="utf-8")
