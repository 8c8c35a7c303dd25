"""The Ascend platform is found by its name, without torch_npu."""

from __future__ import annotations

from vllm.platforms import resolve_platform


def test_the_platform_is_found() -> None:
    platform = resolve_platform("npu")
    found = (platform.name, platform.dist_backend, platform.rollout_ops)
    assert found == ("npu", "hccl", "vllm_ascend.ops:rollout_ops")
