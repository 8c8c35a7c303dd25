"""docs/parameters.md is what the config says, and the config says what every key means."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.workshop.reference.__main__ import EXIT_DIFFERENT, PAGE, main, problems
from tools.workshop.reference.parameters import FREE_SECTIONS, REFERENCE_ENGINE, Parameter, meanings_in, sections
from verl.trainer.config.declared import declared_keys
from verl.workers.config import rollout


@pytest.fixture(scope="module")
def found() -> dict[str, Parameter]:
    return {item.key: item for section in sections() for item in section.parameters}


def test_the_page_is_current_and_no_key_lacks_a_meaning() -> None:
    assert problems() == []


def test_every_key_of_the_config_is_there_once(found: dict[str, Parameter]) -> None:
    expected = {key for key in declared_keys() if not key.startswith(REFERENCE_ENGINE)}
    expected |= {f"{section}.{key}" for section, keys in FREE_SECTIONS.items() for key in keys}
    assert found.keys() == expected
    tables = PAGE.read_text(encoding="utf-8").partition("\n## `")[2].partition("\n## Keys of upstream's scripts")[0]
    rows = re.findall(r"^\| `[\w.]+` \|", tables, flags=re.MULTILINE)
    assert len(rows) == len(expected)


def test_every_meaning_stands_above_its_key() -> None:
    found = meanings_in(Path(rollout.__file__).read_text(encoding="utf-8"))
    fields = {**rollout.RolloutConfig.__dataclass_fields__, **rollout.SamplingConfig.__dataclass_fields__}
    assert found.keys() == fields.keys() - {"val_kwargs", "multi_turn", "agent", "profiler"}
    assert found["cudagraph_capture_sizes"].endswith("up to ``max_num_seqs``, on an NPU ``max_num_seqs`` alone.")


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ("trainer.device", "auto, cpu, cuda, npu"),
        ("actor_rollout_ref.actor.clip_ratio_c", "above 1"),
        ("actor_rollout_ref.rollout.top_p", "(0, 1]"),
        ("actor_rollout_ref.rollout.temperature", "above 0"),
        ("actor_rollout_ref.actor.megatron.context_parallel_size", "at least 1"),
        (
            "actor_rollout_ref.actor.policy_loss.loss_mode",
            "cispo, clip_cov, dppo_tv, geo_mean, gpg, gspo, kl_cov, sapo, vanilla, "
            "or a name that a module of actor_rollout_ref.model.external_lib registers",
        ),
        ("trainer.save_freq", "above 0, or -1 for never"),
        ("reward_model.overlong_buffer.len", "1 to data.max_response_length tokens"),
        ("trainer.export_hf", ""),
    ],
)
def test_values_are_those_of_validation(found: dict[str, Parameter], key: str, allowed: str) -> None:
    assert found[key].allowed == allowed


def test_defaults_that_follow_others_say_whom(found: dict[str, Parameter]) -> None:
    assert found["actor_rollout_ref.rollout.prompt_length"].default == "that of `data.max_prompt_length`"
    assert found["actor_rollout_ref.actor.optim.override_optimizer_config.exp_avg_dtype"].default == "`fp32`"
    assert found["actor_rollout_ref.actor.megatron.override_ddp_config.grad_reduce_in_fp32"].default == "`True`"


def test_a_page_that_is_not_current_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "parameters.md"
    assert main(["--check", "--page", str(page)]) == EXIT_DIFFERENT
    assert "--write" in capsys.readouterr().err
    assert main(["--write", "--page", str(page)]) == 0
    page.write_text(page.read_text().replace("`1024`", "`1023`"))
    assert main(["--check", "--page", str(page)]) == EXIT_DIFFERENT
