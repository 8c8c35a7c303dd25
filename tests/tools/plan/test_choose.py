"""``--choose``: a layout that fits with what must move to host memory, and the user's own choices kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipes.common.tiny_models import QWEN3
from tools.plan.devices import GIB, DeviceProfile, load_device
from tools.plan.search.choose import KEPT_FREE, SHARE, Choice, choose
from tools.plan.search.overrides import ENGINE
from tools.plan.setup import planned_run
from tools.plan.timing.constants import load_constants
from tools.plan.timing.run_shape import default_lengths
from tools.plan.training import StepSize

H100 = load_device("h100")


def chosen(device: DeviceProfile, *overrides: str) -> Choice:
    run = planned_run("gsm8k", overrides, device, nodes=None, model=str(QWEN3.directory))
    data = run.config.data
    size = StepSize(data.max_prompt_length, data.max_response_length, 1.0)
    return choose(run, default_lengths(run.config), size, load_constants())


def test_what_is_given_is_kept_and_the_rest_fits(tmp_path: Path) -> None:
    given = ("trainer.n_gpus_per_node=2", f"{ENGINE}.tensor_model_parallel_size=2", f"{SHARE}=0.4")
    choice = chosen(H100, *given)
    assert f"{SHARE}=0.4" in choice.overrides
    assert not any(text.startswith(f"{ENGINE}.tensor_model_parallel_size") for text in choice.overrides)
    assert any("TP2" in reason and "GiB stay free" in reason for reason in choice.reasons), choice.reasons
    run = planned_run("gsm8k", (*choice.overrides, *given), H100, nodes=None, model=str(QWEN3.directory))
    assert run.config.training_layout.tensor_model_parallel_size == 2
    choice.write(tmp_path / "choice.json")
    assert SHARE in (tmp_path / "choice.json").read_text(encoding="utf-8")


def test_drafts_of_which_nothing_is_known_stop_no_choice() -> None:
    method = "actor_rollout_ref.rollout.speculative_config.method=suffix"
    choice = chosen(H100, method, "actor_rollout_ref.rollout.speculative_config.num_speculative_tokens=2")
    assert choice.overrides and choice.reasons[0].startswith("how many drafts of suffix are right depends")


def test_a_device_that_is_too_small_is_refused_with_reasons() -> None:
    choice = chosen(replace(H100, memory_gib=2.1), f"{SHARE}=0.9")
    assert choice.overrides == () and "fits" in choice.reasons[-1]


def test_what_is_given_is_what_is_planned() -> None:
    """The rollout's experts, a layout that is far from the fastest, micro-batches; there is nothing else to cut."""
    given = (f"{ENGINE}.context_parallel_size=2", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048")
    choice = chosen(H100, "trainer.n_gpus_per_node=2", f"{ENGINE}.param_offload=false", *given)
    assert "CP2, rollout" in choice.reasons[1] and not any("experts" in reason for reason in choice.reasons)
    assert not any(text.split("=")[0] in {key.split("=")[0] for key in given} for text in choice.overrides)
    nothing = chosen(H100, f"{ENGINE}.context_parallel_size=3", f"{ENGINE}.param_offload=false")
    assert nothing.overrides == () and "no layout of these devices fits by the bound" in nothing.reasons[-1]


def test_a_part_of_the_device_stays_free() -> None:
    """What has to fit is planned with a smaller device; what stays free is said of the whole one."""
    choice = chosen(H100, f"{SHARE}=0.3", f"{ENGINE}.param_offload=false")
    text = next(reason for reason in choice.reasons if "GiB stay free" in reason)
    free = float(text.partition(" GiB stay free")[0].rpartition(" ")[2])
    used = H100.budget_bytes / GIB - free
    assert used < 0.31 * (1 - KEPT_FREE) * H100.memory_gib


def test_memory_that_the_user_decides_is_not_searched() -> None:
    choice = chosen(H100, f"{ENGINE}.param_offload=false")
    assert not any("offload" in text for text in choice.overrides)
