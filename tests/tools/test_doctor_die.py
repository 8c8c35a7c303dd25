"""What `python -m tools.doctor --die` needs no die for; tests/npu/test_doctor_die.py runs it."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from mindspeed.core import hccl_buffer
from tools.doctor import die_experts, die_groups
from tools.doctor.__main__ import main
from vllm_ascend import platform
from vllm_ascend.ops.exchanged_experts import tokens_of_a_call


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["doctor", "--die"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2 and "torch_npu is not installed" in capsys.readouterr().err


def test_every_group_with_a_buffer_has_an_exchange() -> None:
    assert die_groups.TRAINING.keys() == hccl_buffer.BUFFER_MIB.keys()
    assert die_groups.ROLLOUT.keys() == platform.BUFFER_MIB.keys()


def test_the_buffer_that_a_step_needs_is_the_least_that_takes_it() -> None:
    needed = die_experts.needed_mib(*die_experts.LARGE_RUN)
    fits = [tokens_of_a_call(*die_experts.LARGE_RUN, {"HCCL_BUFFSIZE": str(mib)}) for mib in (needed - 1, needed)]
    assert fits[0] < die_experts.NUM_TOKENS <= fits[1]
