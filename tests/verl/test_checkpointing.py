"""What one rank writes for all: the export as a Hugging Face directory; and files that are replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from megatron.core.ops.reference import reference_ops
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from mindspeed_llm.hf_config import load_hf_config
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from mindspeed_llm.weights import HFCheckpoint, load_weights
from tests.mindspeed_llm.tiny import write_tiny_checkpoint
from tests.parallel.launcher import run_ranks
from verl.trainer.ppo.checkpointing import write_text
from verl.utils.checkpoint import MegatronCheckpointManager
from verl.workers.config import CheckpointConfig


def _export(hf_dir: str, out: str) -> None:
    hf = load_hf_config(hf_dir)
    groups = initialize_model_parallel(expert_model_parallel_size=2)
    model = build_model(hf, groups, reference_ops(), params_dtype=torch.float32)
    load_weights(model, local_plan(hf, groups.layout, groups.coords, "core"), HFCheckpoint(hf_dir))
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


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "latest.txt"
    write_text(path, "10")
    write_text(path, "20")
    assert path.read_text() == "20"
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")  # fails in the middle of writing
    assert path.read_text() == "20"
