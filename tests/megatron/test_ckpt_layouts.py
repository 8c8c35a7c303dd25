"""A checkpoint of any layout goes on in any other as if nothing had happened; in its own, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import CheckpointSaver, load_checkpoint
from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from tests.megatron.ckpt_job import TrainingJob, read_whole, seed_all
from tests.megatron.model_helpers import one_process_world
from tests.parallel.launcher import run_ranks

Sizes = dict[str, Any]

_TP2: Sizes = {"tensor_model_parallel_size": 2}
_TP2_DOWN: Sizes = {**_TP2, "mla_down_proj_column_parallel": True}
_PP2: Sizes = {"pipeline_model_parallel_size": 2, "num_layer_list": (1, 3)}
_EP2: Sizes = {"expert_model_parallel_size": 2}
_DP: Sizes = {}
_UNSHARDED: Sizes = {"optimizer": {"use_distributed_optimizer": False}}
_CPU_ADAM: Sizes = {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}}
_TIED: Sizes = {"model": {"mtp_num_layers": 1, "share_embeddings_and_output_weights": True}}


def _job(sizes: Sizes, seed: int = 7) -> TrainingJob:
    sizes = dict(sizes)
    optimizer, model = sizes.pop("optimizer", {}), sizes.pop("model", {})
    return TrainingJob(initialize_model_parallel(**sizes), seed=seed, optimizer=optimizer, **model)


def _save(root: str, layouts: dict[str, Sizes]) -> None:
    """Per layout: a step, a checkpoint, one more step, and where it ends."""
    for name, sizes in layouts.items():
        job = _job(sizes)
        seed_all(job.groups.rank)
        job.train(1)
        CheckpointSaver(job.groups, max_chunk_bytes=8_000).save(Path(root) / name, *job.state, {"steps": 1})
        job.train(1)
        CheckpointSaver(job.groups).save(Path(root) / f"{name}.end", *job.state, {})
        destroy_model_parallel()


def _resume(root: str, pairs: list[tuple[str, str, Sizes]]) -> list[list[float]]:
    """Per (checkpoint, name of this run, layout): load, a step, and where it ends; the next random numbers."""
    numbers = []
    for source, name, sizes in pairs:
        job = _job(sizes, seed=8)
        seed_all(99)
        assert load_checkpoint(Path(root) / source, *job.state, job.groups, verify_digests=True) == {"steps": 1}
        numbers.append(torch.rand(2).tolist())
        job.train(1)
        CheckpointSaver(job.groups).save(Path(root) / name, *job.state, {})
        destroy_model_parallel()
    return numbers


def _assert_same_end(root: Path, source: str, name: str, tolerance: float) -> None:
    want, got = read_whole(root / f"{source}.end"), read_whole(root / name)
    assert want.keys() == got.keys()
    assert any("expert_bias" in key for key in want) and any("exp_avg_sq.decoder.layers.3" in key for key in want)
    assert "model.decoder.layers.1.mlp.router.weight" in want
    assert "optimizer.master.decoder.layers.1.mlp.router.weight" not in want  # frozen: it has no state
    for key, tensor in want.items():
        error = (tensor - got[key]).abs().max() / tensor.abs().max().clamp(min=1e-9)
        assert error <= tolerance, f"{source} -> {name}: {key} differs by {error}"


def _on_one_process(function: Any, *arguments: Any) -> Any:
    with one_process_world():
        return function(*arguments)


def test_two_ranks_and_one(tmp_path: Path) -> None:
    pairs = [
        ("tp2 down", "tp2 down again", _TP2_DOWN),
        ("tp2 down", "tp2 down to pp2", _PP2),
        ("ep2", "ep2 to tp2 with CPU Adam", _TP2 | _CPU_ADAM),
        ("pp2", "pp2 to unsharded ep2", _EP2 | _UNSHARDED),
    ]
    layouts = {"ep2": _EP2, "pp2": _PP2, "tp2 down": _TP2_DOWN}
    _check_pairs(tmp_path, layouts, pairs, [("ep2", "ep2 to one", _DP)])


@pytest.mark.slow
def test_more_of_two_ranks_and_one(tmp_path: Path) -> None:
    pairs = [
        ("tp2", "tp2 again", _TP2),
        ("tp2", "tp2 to pp2", _PP2),
        ("dp2", "dp2 again", _DP),
        ("dp2", "dp2 to tp2 down", _TP2_DOWN),
        ("dp2", "dp2 to unsharded ep2", _EP2 | _UNSHARDED),
        ("pp2", "pp2 to dp2", _DP),
    ]
    alone = [("tp2", "tp2 to one", _DP), ("dp2", "dp2 to one", _DP), ("tp2 down", "tp2 down to one", _DP)]
    _check_pairs(tmp_path, {"tp2": _TP2, "dp2": _DP, "pp2": _PP2, "tp2 down": _TP2_DOWN}, pairs, alone)


def _check_pairs(
    root: Path, layouts: dict[str, Sizes], pairs: list[tuple[str, str, Sizes]], alone: list[tuple[str, str, Sizes]]
) -> None:
    run_ranks(_save, 2, str(root), layouts)
    run_ranks(_resume, 2, str(root), pairs)
    _on_one_process(_resume, str(root), alone)
    for source, name, _ in pairs + alone:
        _assert_same_end(root, source, name, 0.0 if name.endswith("again") else 1e-5)


@pytest.mark.slow
def test_four_ranks_and_fewer(tmp_path: Path) -> None:
    four = {
        "tp2 ep4": _TP2 | {"expert_model_parallel_size": 4},
        "tp2 etp2 ep2": _TP2 | _EP2 | {"expert_tensor_parallel_size": 2},
        "cp2 pp2": {"context_parallel_size": 2} | _PP2,
        "tied pp2 vpp2": _TIED
        | {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
        | {"expert_model_parallel_size": 2},
    }
    run_ranks(_save, 4, str(tmp_path), four)
    _on_one_process(_save, str(tmp_path), {"one": _DP})
    to_four = [
        ("tp2 ep4", "tp2 ep4 again", four["tp2 ep4"]),
        ("tp2 etp2 ep2", "tp2 etp2 ep2 to cp2 pp2", four["cp2 pp2"]),
        ("one", "one to tp2 etp2 ep2", four["tp2 etp2 ep2"]),
        ("tied pp2 vpp2", "tied pp2 vpp2 again", four["tied pp2 vpp2"]),
    ]
    first, second = run_ranks(_resume, 4, str(tmp_path), to_four)[:2]
    assert first[1] != second[1]  # in another layout every rank draws its own numbers
    to_two = [
        ("cp2 pp2", "cp2 pp2 to tp2", _TP2),
        ("tp2 ep4", "tp2 ep4 to dp2", _DP),
        ("tied pp2 vpp2", "tied pp2 vpp2 to tp2", _TP2 | _TIED),
    ]
    numbers = run_ranks(_resume, 2, str(tmp_path), [*to_two, to_two[1]])
    assert all(own[1] == own[3] for own in numbers)  # and the same ones whenever it is loaded
    for source, name, _ in to_four + to_two:
        _assert_same_end(tmp_path, source, name, 0.0 if name.endswith("again") else 1e-5)
