"""The images are made from what the repository pins, and from nothing that floats."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.doctor.finding import load_table

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE, CUDA = ROOT / "Dockerfile.vllm_ascend.mindspeed.deepseekV3", ROOT / "Dockerfile.cuda"
BOTH = pytest.mark.parametrize("dockerfile", [DOCKERFILE, CUDA], ids=lambda path: path.suffixes[0])


def instructions(dockerfile: Path = DOCKERFILE) -> str:
    """Without comments, continued lines joined."""
    lines = [line for line in dockerfile.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return re.sub(r"\\\n\s*", " ", "\n".join(lines))


@BOTH
def test_python_packages_come_from_the_pinned_requirements_only(dockerfile: Path) -> None:
    installs = re.findall(r"-m pip install ([^\n&]*)", instructions(dockerfile))
    assert len(installs) == 1
    words = [word.strip('"') for word in installs[0].split()]
    files = [words[i + 1] for i, word in enumerate(words) if word in ("-r", "-c")]
    folder, device = ("requirements", "cuda") if dockerfile == CUDA else ("$pins", "npu")
    assert files == [f"{folder}/{name}.txt" for name in ("constraints", "base", device)]
    assert [word for word in words if not word.startswith("-") and word not in files] == []
    for stack in load_table()[0]:
        for name in (file.replace("$pins", stack.requirements) for file in files):
            for line in (ROOT / name).read_text(encoding="utf-8").splitlines():
                assert not line.strip() or line.startswith("#") or "==" in line, f"{name}: {line} is not pinned"


def test_every_stack_has_an_image_with_its_cann_and_its_pins() -> None:
    images = dict(re.findall(r"^FROM quay\.io/ascend/cann:(\S+) AS (\w+)$", instructions(), re.MULTILINE))
    stacks = load_table()[0]
    assert list(images.values()) == [stack.name for stack in stacks]
    for tag, stack in zip(images, stacks, strict=True):
        assert tag.startswith(f"{stack.cann}.") and "-a3-" in tag and tag.endswith("-py3.11")
        chosen = subprocess.run(
            ["bash", "-c", f'{_choice_of_pins()}; echo "$pins"'],
            env={"STACK": stack.name},
            capture_output=True,
            text=True,
            check=True,
        )
        assert chosen.stdout.strip() == stack.requirements
    assert re.findall(r"^ARG (\w+)=(\S+)$", instructions(), re.MULTILINE) == [
        ("STACK", stacks[0].name),
        ("CANN_IMAGE", "${STACK}"),
    ]
    # An ARG before the first FROM is not seen after it unless it is named again.
    _, _, last_stage = instructions().partition("FROM ${CANN_IMAGE}\n")
    assert last_stage.startswith("ARG STACK\n")


def _choice_of_pins() -> str:
    """The words of the shell that choose the folder of pins."""
    (choice,) = re.findall(r"RUN (case .* esac)", instructions())
    return choice


def test_the_cuda_image_has_torchs_cuda_and_the_same_steps() -> None:
    (tag,) = re.findall(
        r"^ARG CUDA_IMAGE=docker\.io/nvidia/cuda:([\d.]+)-devel-ubuntu[\d.]+$", instructions(CUDA), re.M
    )
    pins = (ROOT / "requirements/constraints.txt").read_text(encoding="utf-8")
    assert f"\ncuda-toolkit=={'.'.join(tag.split('.')[:2])}." in pins
    for line in ("RUN bash tools/setup_env.sh command", "ENV SETUP=no", "ENV VENV_DIR=/opt/r1_zero", "COPY . ."):
        assert f"{line}\n" in instructions() and f"{line}\n" in instructions(CUDA)
    for package in ("jemalloc", "iproute", "git", "g++"):
        assert package in instructions() and package in instructions(CUDA)


@BOTH
def test_what_is_copied_is_there(dockerfile: Path) -> None:
    for source in re.findall(r"^COPY (\S+) ", instructions(dockerfile), re.MULTILINE):
        assert (ROOT / source).exists(), source


def test_device_settings_live_in_one_file() -> None:
    """HCCL, CANN and allocator variables are exported by npu_env.sh and by nothing else that a run starts."""
    setting = re.compile(r"^\s*(?:export|ENV)\s+(?:HCCL_|ASCEND_|PYTORCH_NPU|TASK_QUEUE|MALLOC_)", re.MULTILINE)
    home = ROOT / "recipes" / "common" / "npu_env.sh"
    assert setting.search(home.read_text(encoding="utf-8"))
    for path in [DOCKERFILE, CUDA, *(ROOT / "recipes").rglob("*.sh"), *(ROOT / "tools").rglob("*.sh")]:
        if path != home:
            assert not setting.search(path.read_text(encoding="utf-8")), path


def test_no_variable_is_set_that_nothing_reads() -> None:
    """Upstream's scripts export these; neither this tree nor torch_npu, CANN or glibc reads them in such a run."""
    dead = ("CUDA_DEVICE_MAX_CONNECTIONS", "HCCL_IF_BASE_PORT=", "VLLM_ENABLE_FIX_ROUTE", "VLLM_ENABLE_MC2")
    dead += ("VLLM_ASCEND_ACL_OP_INIT_MODE", "LCAL_COMM_ID")
    for path in [DOCKERFILE, CUDA, *(ROOT / "recipes").rglob("*.sh"), *(ROOT / "recipes").rglob("*.yaml")]:
        text = path.read_text(encoding="utf-8")
        assert not [name for name in dead if name in text], path
