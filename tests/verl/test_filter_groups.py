"""Dynamic sampling and the overlong punishment: which groups are kept, after how many generations, what is told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.config import PPOTrainerConfig, load_config, validate_config
from verl.trainer.ppo.filter_groups import (
    SampleGroup,
    check_reward_nonzero_std,
    collect_groups,
    group_filter,
    groups_of,
    load_filter,
)
from verl.trainer.ppo.scores import add_scores, reward_parts
from verl.workers.config import OverlongBufferConfig
from verl.workers.reward_manager import Scores
from verl.workers.reward_manager.dapo import overlong_penalty

KEY = "algorithm.filter_groups"
CFG = "+reward_model.reward_kwargs.overlong_buffer_cfg"
WIDTH = 4
BUILT_IN = "verl.trainer.ppo.filter_groups.check_reward_nonzero_std"


def _config(*overrides: str) -> PPOTrainerConfig:
    return load_config([f"{KEY}.enable=True", *(f"{KEY}.{override}" for override in overrides)])


def _scored(generation: int, scores: list[float], samples: int = 2, lengths: list[int] | None = None) -> DataProto:
    """``samples`` rows per prompt; accuracy is 1 where the score is above a half."""
    num_rows = len(scores)
    lengths_B = torch.tensor(lengths or [1] * num_rows)
    mask = (torch.arange(WIDTH) < lengths_B[:, None]).long()
    uids = [f"{generation}-{row // samples}" for row in range(num_rows)]
    batch = DataProto.from_dict({"response_mask": mask}, {"uid": np.array(uids, dtype=object)})
    on_tokens = torch.zeros(mask.shape)
    on_tokens[torch.arange(num_rows), lengths_B - 1] = torch.tensor(scores)
    parts = {"score": np.array(scores), "accuracy": (np.array(scores) > 0.5).astype(float)}
    add_scores(batch, Scores(on_tokens, parts, [""] * num_rows), OverlongBufferConfig())
    return batch


def test_groups_whose_metric_varies_are_kept() -> None:
    groups = [group for group, _ in groups_of(_scored(0, [1.0, 0.0, 1.0, 1.0, 0.33, 0.0]))]
    assert [group.uid for group in groups] == ["0-0", "0-1", "0-2"]
    assert groups[2].lengths.tolist() == [1, 1] and groups[2].parts["accuracy"].tolist() == [0.0, 0.0]
    by_metric = {
        metric: [group_filter(_config(f"metric={metric}"))(group) for group in groups]
        for metric in ("accuracy", "score", "seq_reward")
    }
    assert by_metric == {
        "accuracy": [True, False, False],
        "score": [True, False, True],
        "seq_reward": [True, False, True],
    }
    with pytest.raises(ValueError, match="metric is 'acc'; the reward function gives accuracy, score, and seq_reward"):
        group_filter(_config("metric=acc"))(groups[0])


def test_a_function_by_path_decides(tmp_path: Path) -> None:
    group = SampleGroup("0", np.array([1.0, 1.0]), {}, np.array([3, 9]))
    assert load_filter(BUILT_IN) is check_reward_nonzero_std
    assert not group_filter(_config(f"filter_path={BUILT_IN}"))(group)
    file = tmp_path / "mine.py"
    file.write_text("limit = 5\ndef any_long(config, group):\n    return group.lengths.max() > config.data.seed\n")
    assert group_filter(load_config([f"{KEY}={{enable:True,filter_path:{file}:any_long}}", "data.seed=5"]))(group)
    for path, told in (
        ("nowhere.at.all", "No module named 'nowhere'"),
        (f"{file}:absent", "defines no 'absent'"),
        (f"{file}:limit", "a int; no function"),
        ("word", "expected package.module.name or file.py:name"),
    ):
        with pytest.raises(ValueError, match=told):
            load_filter(path)


def test_generations_go_on_until_there_are_enough_groups() -> None:
    rounds = [
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],  # one of three varies
        [0.0, 0.0, 1.0, 1.0, 0.0, 0.0],  # none
        [0.0, 1.0, 1.0, 0.0, 0.0, 1.0],  # all, of which one too many
    ]
    batch, metrics = collect_groups(
        lambda generation: _scored(generation, rounds[generation]), group_filter(_config("metric=score")), 3, 0
    )
    assert batch.non_tensor_batch["uid"].tolist() == ["0-0", "0-0", "2-0", "2-0", "2-1", "2-1"]
    assert batch.batch["token_level_scores"].sum(-1).tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert reward_parts(batch)["accuracy"].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert metrics["train/num_gen_batches"] == 3.0
    assert metrics["train/kept_groups_ratio"] == pytest.approx(4 / 9)
    assert metrics["train/dropped_surplus_groups"] == 1.0
    assert metrics["train/reward_before_filter"] == pytest.approx(8 / 18)


def test_too_many_generations_are_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"2 generations gave 2 of the 3 prompts .* \(4 tried\).*max_num_gen_batches"):
        collect_groups(
            lambda g: _scored(g, [1.0, 0.0, 1.0, 1.0]), lambda group: check_reward_nonzero_std(None, group), 3, 2
        )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([f"{KEY}.enable=True"], "give one of algorithm.filter_groups.metric and algorithm.filter_groups.filter_path"),
        ([f"{KEY}={{enable:True,metric:score,filter_path:a.b}}"], "(both are given)"),
        ([f"{KEY}.max_num_gen_batches=-1"], "max_num_gen_batches is -1; give a number, or 0 for no limit"),
        ([f"{KEY}={{enable:True,metric:score}}", "actor_rollout_ref.rollout.n=1"], "rollout.n is 1: the samples"),
        (["data.gen_batch_size=0"], "data.gen_batch_size is 0; it must be at least 1"),
        (["data.gen_batch_size=64"], "which only algorithm.filter_groups.enable=True "),
        (["reward_model.overlong_buffer.enable=True"], "overlong_buffer.len is 0; expected 1 to data.max_response"),
        (["reward_model.overlong_buffer={enable:True,len:8,penalty_factor:-1}"], "penalty_factor is -1"),
        ([f"{CFG}={{enable:True,len:0}}"], "reward_kwargs.overlong_buffer_cfg.len is 0; expected 1 to data.max_resp"),
        ([f"{CFG}={{enable:True,length:8}}"], "expected a section with enable, len, penalty_factor, log"),
        ([f"{CFG}={{enable:1,len:8}}"], "overlong_buffer_cfg.enable is 1; expected"),
        (["+reward_model.reward_kwargs.max_resp_len=9"], "max_resp_len is 9, but data.max_response_length is 512"),
        (["+reward_model.reward_kwargs.max_len=9"], "reward_kwargs.max_len is not known here"),
        (
            [f"{CFG}={{enable:True,len:8}}", "reward_model.overlong_buffer={enable:True,len:9}"],
            "overlong_buffer_cfg and reward_model.overlong_buffer are both given",
        ),
    ],
)
def test_what_cannot_work_is_told(overrides: list[str], told: str) -> None:
    assert told in "\n".join(validate_config(load_config(overrides)))


def test_upstreams_place_of_the_overlong_buffer_counts() -> None:
    given = [f"{CFG}={{enable:True,len:8,penalty_factor:0.5,log:False}}", "reward_model.reward_manager=dapo"]
    config = load_config([*given, "+reward_model.reward_kwargs.max_resp_len=512"])
    assert not any("reward_model" in problem for problem in validate_config(config))
    assert config.reward_model.overlong == OverlongBufferConfig(enable=True, len=8, penalty_factor=0.5)
    assert load_config().reward_model.overlong == OverlongBufferConfig()


def test_overlong_penalty_is_the_papers() -> None:
    lengths, longest, buffer = np.arange(1, 21), 20, 8
    expected = [0.0 if n <= 12 else (12 - n) / 8 for n in lengths]
    config = OverlongBufferConfig(enable=True, len=buffer, penalty_factor=0.5)
    found = overlong_penalty(torch.tensor(lengths), longest, config)
    np.testing.assert_allclose(found.numpy(), 0.5 * np.array(expected), atol=1e-7)


def test_the_penalty_stands_beside_the_score() -> None:
    batch = _scored(0, [1.0, 1.0, 0.0], lengths=[2, 3, 4])
    scores = Scores(batch.batch["token_level_scores"], {"score": np.array([1.0, 1.0, 0.0])}, [""] * 3)
    add_scores(batch, scores, OverlongBufferConfig(enable=True, len=2, penalty_factor=1.0, log=True))
    assert batch.batch["token_level_scores"].tolist() == [[0, 1, 0, 0], [0, 0, 0.5, 0], [0, 0, 0, -1]]
    parts = reward_parts(batch)
    assert parts["score"].tolist() == [1.0, 1.0, 0.0]
    assert parts["overlong_reward"].tolist() == [0.0, -0.5, -1.0] and parts["overlong"].tolist() == [0.0, 1.0, 1.0]
    assert check_reward_nonzero_std(load_config(), groups_of(batch)[0][0])
