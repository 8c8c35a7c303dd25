"""Communication overlap under the names of verl, Megatron and MindSpeed."""

from __future__ import annotations

from dataclasses import fields

import pytest

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.model import GradientCheckpointingConfig
from verl.workers.config.overrides import DDP_OVERRIDES


@pytest.mark.parametrize("name", ["moe_alltoall_overlap_comm", "moe_shared_expert_overlap"])
def test_both_names_of_the_expert_overlap_reach_the_engine(name: str) -> None:
    for value in (True, False):
        engine = McoreEngineConfig(override_transformer_config={name: value})
        assert engine.problems("actor.megatron") == []
        passed_on = engine.transformer_fields(GradientCheckpointingConfig(), is_on=False)
        assert passed_on.get("moe_shared_expert_overlap", False) is value
    assert "moe_shared_expert_overlap" in {field.name for field in fields(TransformerConfig)}


def test_what_the_gradient_buckets_take() -> None:
    given = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 5}
    assert McoreEngineConfig(override_ddp_config=given).problems("actor.megatron") == []
    assert DistributedDataParallelConfig(**given).bucket_size == 5
    assert set(DDP_OVERRIDES) <= {field.name for field in fields(DistributedDataParallelConfig)}
    wrong = {"overlap_grad_reduce": "yes", "bucket_size": 0, "overlap_grads": True}
    found = McoreEngineConfig(override_ddp_config=wrong).problems("actor.megatron")
    assert [problem.split(";")[0] for problem in found] == [
        "actor.megatron.override_ddp_config.overlap_grad_reduce is 'yes'",
        "actor.megatron.override_ddp_config.bucket_size is 0",
        "actor.megatron.override_ddp_config.overlap_grads is not known here",
    ]
