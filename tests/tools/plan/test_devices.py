"""Device profiles are read with every problem at once, from their names or from anybody's file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.plan.devices import PROFILES, known_devices, load_device
from tools.plan.setup import planned_run


@pytest.mark.parametrize("name", known_devices())
def test_every_profile_loads(name: str) -> None:
    device = load_device(name)
    assert device.domain_link.gbs >= device.scale_out_link.gbs
    assert device.memory_bytes <= device.host_memory_bytes


def test_profiles_state_the_published_figures() -> None:
    a3, h100 = load_device("a3"), load_device("h100")
    assert (a3.devices_per_node, a3.memory_gib, a3.hbm_gbs, a3.domain_link.gbs) == (16, 64, 1600, 196)
    assert (h100.devices_per_node, h100.hbm_gbs, h100.peak_bf16_tflops) == (8, 3350, 989)


def test_a_profile_of_ones_own(tmp_path: Path) -> None:
    text = (PROFILES / "h20.toml").read_text(encoding="utf-8").replace("memory_gib = 95.6", "memory_gib = 141")
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert load_device(str(tmp_path / "mine.toml")).memory_gib == 141


def test_a_profile_has_the_values_of_the_one_that_it_is_like(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('like = "h20"\nname = "mine"\nmemory_gib = 141\n', encoding="utf-8")
    assert load_device(str(tmp_path / "mine.toml")) == replace(load_device("h20"), name="mine", memory_gib=141)
    (tmp_path / "other.toml").write_text('like = "h21"\n', encoding="utf-8")
    with pytest.raises(ValueError, match="no device 'h21'"):
        load_device(str(tmp_path / "other.toml"))


def test_every_problem_is_named(tmp_path: Path) -> None:
    text = (PROFILES / "h100.toml").read_text(encoding="utf-8")
    text = text.replace("hbm_gbs = 3350", "hbm_gb = 3350").replace('family = "cuda"', 'family = "gpu"')
    text = text.replace("gbs = 50", "gbs = 0").replace("domain_devices = 8", "domain_devices = 4")
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match="problem") as error:
        load_device(str(tmp_path / "bad.toml"))
    for part in (
        "bad.toml",
        "unknown key hbm_gb; the nearest known key is hbm_gbs",
        "hbm_gbs is missing",
        "family is 'gpu'; expected one of ascend, cuda, cpu",
        "scale_out_link.gbs is 0",
        "domain_devices is 4, below devices_per_node 8",
    ):
        assert part in str(error.value)


def test_an_unknown_device_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"no device 'h1000'; known devices: a2, a3, .*h100"):
        load_device("h1000")
    with pytest.raises(ValueError, match=r"no file \./none\.toml"):
        load_device("./none.toml")


def test_a_run_on_any_device_is_planned_for_the_one_that_is_asked_about() -> None:
    """``trainer.device=auto``: what an engine captures as graphs depends on it."""
    for name, kind in (("a2", "npu"), ("h100", "cuda"), ("cpu", "cpu")):
        run = planned_run("gsm8k", (), load_device(name), nodes=None, model="qwen3_0.6b")
        assert run.config.trainer.device == kind
    run = planned_run("gsm8k", ("trainer.device=npu",), load_device("h100"), nodes=None, model="qwen3_0.6b")
    assert run.config.trainer.device == "npu"


def test_a_dispatcher_of_kernels_is_planned_as_all_to_all() -> None:
    given = "actor_rollout_ref.actor.megatron.override_transformer_config.moe_token_dispatcher_type=flex"
    run = planned_run("deepseek_r1_671b_128gpu", (given,), load_device("h100"), nodes=None, model=None)
    actor, ref = run.config.actor_rollout_ref.actor.megatron, run.config.actor_rollout_ref.ref.megatron
    assert ref is not None
    for engine in (actor, ref):
        assert engine.override_transformer_config["moe_token_dispatcher_type"] == "alltoall"
