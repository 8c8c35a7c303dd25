"""What one rank writes for all: the export as a Hugging Face directory; and files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hf_formats.config import load_hf_config
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.ops.reference import reference_ops
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from tests.megatron.model_helpers import one_process_groups
from tests.mindspeed_llm.tiny import write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from verl.trainer.ppo.checkpointing import write_text
from verl.utils.checkpoint import MegatronCheckpointManager
from verl.workers.config import CheckpointConfig


def _export(hf_dir: str, out: str) -> None:
    hf = load_hf_config(hf_dir)
    groups = initialize_model_parallel(expert_model_parallel_size=2)
    model = build_model(hf, groups, reference_ops(), params_dtype=torch.float32)
    load_weights(model, local_plan(hf, groups.layout, groups.rank, "core"), HFCheckpoint(hf_dir))
    unused: nn.Module = nn.Identity()  # optimizer and scheduler take no part in an export
    manager = MegatronCheckpointManager(CheckpointConfig(), model, unused, unused, hf, hf_dir, groups)  # type: ignore[arg-type]
    manager.export_hf(f"{out}/rank_{groups.rank}")
    destroy_model_parallel()


def test_only_the_first_rank_writes_the_export(tmp_path: Path) -> None:
    weights = write_tiny_checkpoint(tmp_path / "hf")
    run_ranks(_export, 2, str(tmp_path / "hf"), str(tmp_path / "out"), timeout_s=60)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["rank_0"]
    with HFCheckpoint(tmp_path / "out" / "rank_0") as exported:
        assert set(exported.names()) == set(weights)
        for name, tensor in weights.items():
            assert torch.equal(exported.read(name), tensor)


def test_async_save_names_the_latest_when_it_is_complete(tmp_path: Path) -> None:
    hf_dir, actor = tmp_path / "hf", tmp_path / "global_step_7" / "actor"
    write_tiny_checkpoint(hf_dir)
    hf = load_hf_config(str(hf_dir))
    with one_process_groups() as groups:
        module = build_model(hf, groups, reference_ops(), params_dtype=torch.float32)
        module.init_weights(3)
        model = DistributedDataParallel(module.config, DistributedDataParallelConfig(), module, groups)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-2), model, groups, reference_ops())
        scheduler = OptimizerParamScheduler(optimizer, max_lr=1e-2, lr_decay_steps=9)
        config = CheckpointConfig(async_save=True)
        manager = MegatronCheckpointManager(config, module, optimizer, scheduler, hf, str(hf_dir), groups)
        manager.save_checkpoint(str(actor), global_step=7, latest_path=str(tmp_path / "latest.txt"))
        manager.check()
        want = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        module.init_weights(4)  # the next step, meanwhile
        manager.wait()
        assert (tmp_path / "latest.txt").read_text() == "7"
        assert manager.problems_of(str(actor)) == []
        assert manager.load_checkpoint(str(actor)) == 7
        assert all(torch.equal(tensor, want[name]) for name, tensor in module.state_dict().items())


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "latest.txt"
    write_text(path, "10")
    write_text(path, "20")
    assert path.read_text() == "20"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")  # fails in the middle of writing
    assert path.read_text() == "20"
