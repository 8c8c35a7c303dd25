"""DeepSeek-V3's true structure: forecast at its true widths, converted for 256 ranks with narrower layers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_formats.config import parse_hf_config
from mindspeed_llm.conversion.hf_writer import published, published_config
from mindspeed_llm.hf_shapes import hf_tensors
from tools.workshop.bench.models import deepseek_v3_config
from tools.workshop.bench.published_checkpoint import NUM_FILES, write_published_checkpoint

LAYOUT = [
    *("--target-tensor-parallel-size", "4", "--target-pipeline-parallel-size", "8"),
    *("--target-expert-parallel-size", "8", "--num-layer-list", "7,7,8,8,8,8,8,7"),
    *("--moe-grouped-gemm", "--moe-tp-extend-ep"),
]
# Runs the command that follows and prints the most memory that it had, in MiB.
PEAK = (
    "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
    "print('peak', resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024); sys.exit(code)"
)


def command(load: Path, save: Path, *flags: str) -> str:
    convert = [sys.executable, "-m", "mindspeed_llm.convert_ckpt_deepseek3", "--load-dir", str(load)]
    whole = [sys.executable, "-c", PEAK, *convert, "--save-dir", str(save), *LAYOUT, *flags]
    return subprocess.run(whole, check=True, capture_output=True, text=True, timeout=1500).stdout


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, text
    return int(found[1].replace(",", ""))


@pytest.mark.slow
def test_671b_is_forecast_from_its_config(tmp_path: Path) -> None:
    config = deepseek_v3_config()
    hf = parse_hf_config(config).with_mtp(1)
    stored = [tensor for name, (shape, _) in hf_tensors(hf).items() for tensor in published(name, shape).stored()]
    assert len(stored) == 91_991
    (tmp_path / "config.json").write_text(json.dumps(published_config(config, 1)))
    said = command(tmp_path, tmp_path / "out", "--dry-run")
    assert number(r"parameters +([\d,]+)", said) == 671_026_419_200
    assert number(r"files +(\d+)", said) == 256
    assert round(number(r"bytes +([\d,]+) \(", said) / 1e9) == 1631
    assert number(r"peak memory +(\d+) MiB", said) < 1024
    assert number(r"peak (\d+)", said) < 1024


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_full_shape_fits_in_the_memory_that_is_forecast(tmp_path: Path) -> None:
    config = deepseek_v3_config(divide=64)
    assert write_published_checkpoint(tmp_path / "hf", config)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == NUM_FILES
    forecast_mib = number(r"peak memory +(\d+) MiB", command(tmp_path / "hf", tmp_path / "out", "--dry-run"))
    measured_mib = number(r"peak (\d+)", command(tmp_path / "hf", tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("iter_0000001/mp_rank_*_*_*/model_optim_rng.pt"))) == 256
    assert measured_mib < 1024
    assert abs(measured_mib - forecast_mib) < 0.1 * forecast_mib
