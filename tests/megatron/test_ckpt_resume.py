"""Checkpoints: a resumed run is the run that never stopped, and damage is found and named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointSaver, is_complete, load_checkpoint
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.ops import reference_ops
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import ProcessGroups, destroy_model_parallel, initialize_model_parallel
from tests.parallel.launcher import run_ranks
from tests.parallel.toy import HIDDEN, ToyStage, toy_config, toy_stage

Job = tuple[DistributedDataParallel, DistributedOptimizer, OptimizerParamScheduler]


def _job(groups: ProcessGroups) -> Job:
    config = toy_config()
    stage = toy_stage(groups, config, 4)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), stage, groups)
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, groups, reference_ops())
    return model, optimizer, OptimizerParamScheduler(optimizer, max_lr=1e-2, lr_decay_steps=9, lr_decay_style="linear")


def _train(job: Job, num_steps: int) -> list[float]:
    """Steps on noise from every global generator, so that a state that is not restored shows."""
    model, optimizer, scheduler = job
    norms = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        shift = random.random() + random.gauss(0, 1) + float(np.random.standard_normal())
        model.set_input_tensor(torch.randn(5, HIDDEN) + shift)
        model(torch.empty(0)).square().sum().backward()
        finalize_model_grads(model, model.groups)
        norms.append(optimizer.step()[1])
        scheduler.step()
    return norms


def _seed(rank: int) -> None:
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)


def _check_resume(groups: ProcessGroups, directory: Path) -> None:
    _seed(groups.rank)
    never_stopped = _job(groups)
    _train(never_stopped, 3)
    extra = {"global_step": 3, "data": {"epoch": 0.1, "order": [2, 0, 1]}}
    CheckpointSaver(groups).save(directory, *never_stopped, extra if groups.rank == 0 else {})
    assert is_complete(directory, verify_digests=True)
    want = _train(never_stopped, 3)

    _seed(99)
    resumed = _job(groups)
    _train(resumed, 1)
    resumed[1].offload()
    assert load_checkpoint(directory, *resumed, groups, verify_digests=True) == extra
    resumed[1].onload()
    assert _train(resumed, 3) == want
    assert all(torch.equal(a, b) for a, b in zip(never_stopped[0].parameters(), resumed[0].parameters(), strict=True))
    assert never_stopped[1].param_groups == resumed[1].param_groups


def test_resume_of_one_rank_is_bit_identical(one_rank: ProcessGroups, tmp_path: Path) -> None:
    _check_resume(one_rank, tmp_path / "a" / "step_3")
    job = _job(one_rank)
    load_checkpoint(tmp_path / "a" / "step_3", job[0].module, None, None, one_rank)
    CheckpointSaver(one_rank).save(tmp_path / "a" / "step_3", *job, {"again": True})
    assert load_checkpoint(tmp_path / "a" / "step_3", *job, one_rank) == {"again": True}
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["step_3"]


def _resume_at_two_layouts(directory: str) -> None:
    groups = initialize_model_parallel(1, 2)
    _check_resume(groups, Path(directory) / "pp2")
    destroy_model_parallel()
    groups = initialize_model_parallel()
    _check_resume(groups, Path(directory) / "dp2")
    _check_model_keys_are_saved_once(Path(directory) / "dp2")
    job = _job(groups)
    assert load_checkpoint(Path(directory) / "pp2", *job, groups)["global_step"] == 3

    blocked = Path(directory) / "a file"
    blocked.touch()
    with pytest.raises(OSError, match="rank 0: .*a file"):  # on both ranks
        CheckpointSaver(groups).save(blocked / "step_1", *job, {})


def _check_model_keys_are_saved_once(directory: Path) -> None:
    reader = torch.distributed.checkpoint.FileSystemReader(directory)
    keys = list(reader.read_metadata().state_dict_metadata)
    assert sum(key == "model.layers.0.weight" for key in keys) == 1
    assert sum(key == "optimizer.master.layers.0.weight" for key in keys) == 1


def test_resume_of_two_ranks_is_bit_identical(tmp_path: Path) -> None:
    run_ranks(_resume_at_two_layouts, 2, str(tmp_path), timeout_s=90)


def test_without_process_groups_and_with_damage(tmp_path: Path) -> None:
    directory = tmp_path / "step_1"
    model = ToyStage(toy_config(), range(2))
    CheckpointSaver().save(directory, model, None, None, {"epoch": 1})
    other = ToyStage(toy_config(), range(2))
    torch.nn.init.zeros_(other.layers["0"].weight)
    assert load_checkpoint(directory, other, None, None) == {"epoch": 1}
    assert torch.equal(model.layers["0"].weight, other.layers["0"].weight)
    with pytest.raises(ValueError, match=r"model.layers.2.weight is not in it"):
        load_checkpoint(directory, ToyStage(toy_config(), range(3)), None, None)
    with pytest.raises(ValueError, match=r"is torch.float32 in it, torch.bfloat16 in this job"):
        load_checkpoint(directory, ToyStage(toy_config(), range(2)).bfloat16(), None, None)

    data = directory / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert is_complete(directory)
    assert not is_complete(directory, verify_digests=True)
    with pytest.raises(ValueError, match=r"__0_0.distcp is damaged"):
        load_checkpoint(directory, other, None, None, verify_digests=True)
    data.write_bytes(content[:-7])
    assert not is_complete(directory)
    with pytest.raises(ValueError, match=rf"__0_0.distcp has {len(content) - 7} bytes, expected {len(content)}"):
        load_checkpoint(directory, other, None, None)
    data.unlink()
    (directory / "common.json").unlink()
    with pytest.raises(ValueError, match=r"__0_0.distcp is missing; .*common.json is missing"):
        load_checkpoint(directory, other, None, None)

    for broken in ("{", json.dumps({"format": 1}), json.dumps({"format": 7})):
        (directory / "manifest.json").write_text(broken)
        with pytest.raises(ValueError, match=r"manifest.json"):
            load_checkpoint(directory, other, None, None)
    (directory / "manifest.json").unlink()
    assert not is_complete(directory)
    assert not is_complete(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"manifest.json does not exist"):
        load_checkpoint(directory, other, None, None)
