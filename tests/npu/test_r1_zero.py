"""Training with ``trainer.device=npu`` on two fake dies, beside the same job on the CPU; slow: the whole command."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from pathlib import Path

import pytest
import ray
import torch

from megatron.core.ops.reference import reference_ops
from mindspeed.ops import train_ops
from tests.profiles import MICRO_BATCHES, PARTS, PHASES, assert_whole_step
from tests.ray_workers import ray_with_forked_workers
from tests.system.command import Command, read_metrics
from tests.system.in_process import convert, fit, in_process_config
from tests.system.jobs import Prepared, prepare
from tools.plan.devices import load_device
from tools.plan.op_costs import _entry, by_phase, read_calls, report
from tools.plan.rank_plan import plan_rank
from tools.plan.training import StepSize
from verl.trainer.config import PPOTrainerConfig
from vllm.ops.reference import rollout_ops as reference_rollout_ops
from vllm_ascend.ops import rollout_ops

TOLERANCE = 1e-3  # relative
LAUNCHES_APART = 0.15
MOE_LAYERS = 2  # their split sizes must be known on the host
# How often the host waits for the device in each occurrence of a phase.
WAITS = {
    "generate_sequences": 40,  # once a step, for what the replicas say of it
    "generate_sequences/prefill": 2,  # tokens and log-probs
    "generate_sequences/decode": 2,
    "generate_sequences/weight_sync": 6,  # digests, whether any differs, whether all values are finite
    "compute_log_prob": MOE_LAYERS + 3,  # the ranks' agreement, the number of micro-batches, the scores
    "compute_ref_log_prob": MOE_LAYERS + 3,
    "update_actor/forward_backward": MOE_LAYERS + 2,  # one micro-batch
    "update_actor/optimizer_step": 1,  # the gradient norm
}
EAGER = "actor_rollout_ref.rollout.enforce_eager=True"  # each launch is counted
CHANGES = ("trainer.save_freq=-1", "data.val_max_samples=4", EAGER)
PROFILED = (
    "actor_rollout_ref.actor.profiler.enable=True",
    "actor_rollout_ref.actor.profiler.ranks=[1]",
    "global_profiler.steps=[2]",
)
NOT_ANALYSED = "actor_rollout_ref.actor.profiler.tool_config.npu.analysis=False"
COMPARED = (
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "critic/score/mean",
    "critic/rewards/mean",
    "critic/advantages/max",
    "response_length/mean",
)
# What a GRPO step on the device must have run: forward and backward of every fused op, the optimizer, and decoding.
KERNELS = {
    "npu_rms_norm",
    "npu_rms_norm_backward",
    "npu_swiglu",
    "npu_swiglu_backward",
    "npu_rotary_mul",
    "npu_rotary_mul_backward",
    "npu_fusion_attention",
    "npu_fusion_attention_grad",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_permute_grad_v2",
    "_npu_moe_token_unpermute",
    "npu_moe_token_unpermute_grad_v2",
    "npu_moe_gating_top_k",
    "aten::_fused_adamw_",
}


NPU_OPS = {"npu::npu_fusion_attention", "npu::npu_rms_norm", "aten::_fused_adamw_"}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return convert(prepare(tmp_path_factory.mktemp("prepared")), tmp_path_factory.mktemp("converted"))


@ray.remote(num_cpus=1, resources={"NPU": 1})
def on_a_device() -> tuple[float, int]:
    return torch.ones(3, device="npu").sum().item(), torch.npu.device_count()


def test_two_grpo_steps_on_the_device_equal_the_cpus(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This process is the driver of both runs, and their workers are forked; Ray gives each one of the two devices."""
    (tmp_path / "kernels").mkdir()
    monkeypatch.setenv("FAKE_NPU_CALLS_DIR", str(tmp_path / "kernels"))
    with ray_with_forked_workers(num_cpus=2, resources={"NPU": 2}), caplog.at_level(logging.INFO):
        assert ray.get(on_a_device.remote(), timeout=120) == (3.0, 1)
        for device, tool in (("cpu", "torch"), ("npu", "npu")):
            changes = (*CHANGES, *PROFILED, NOT_ANALYSED, f"global_profiler.tool={tool}", f"trainer.device={device}")
            fit(in_process_config(prepared, tmp_path / device, 2, 2, *changes))
    assert_equal(tmp_path, 2)
    assert_native(caplog.text, tmp_path / "kernels")
    assert_costs(tmp_path / "kernels")
    assert_profiled(tmp_path)
    changes = (*CHANGES, "trainer.device=npu", "trainer.hang_timeout_s=0")
    assert_launches(in_process_config(prepared, tmp_path / "plan", 2, 2, *changes), tmp_path / "kernels")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_users_command_trains_on_the_device(prepared: Prepared, tmp_path: Path) -> None:
    with ray_with_forked_workers(num_cpus=2):
        fit(in_process_config(prepared, tmp_path / "cpu", 2, 5, *CHANGES))
    said = run_on_npu(5, prepared, tmp_path, *PROFILED, "global_profiler.tool=npu")
    (trace,) = (tmp_path / "npu" / "profile" / "step_2").rglob("trace_view.json")
    assert_whole_step(trace, NPU_OPS)
    assert_equal(tmp_path, 5)
    assert_native(said, tmp_path / "kernels")


def assert_equal(folder: Path, num_steps: int) -> None:
    """Metrics of the runs in ``cpu`` and ``npu`` agree, and the second has exported its weights."""
    cpu, npu = ({step["step"]: step for step in read_metrics(folder / device)} for device in ("cpu", "npu"))
    assert sorted(cpu) == sorted(npu) == [*range(num_steps + 1)]
    apart = [
        f"step {step}: {name} is {cpu[step][name]} on the CPU, {npu[step][name]} on the device"
        for step in range(1, num_steps + 1)
        for name in COMPARED
        if not math.isclose(cpu[step][name], npu[step][name], rel_tol=TOLERANCE, abs_tol=1e-6)
    ]
    assert not apart, "\n".join(apart)
    assert max(step["training/rollout_probs_diff_max"] for step in npu.values() if step["step"]) < 1e-4
    assert (folder / "npu" / "export_hf" / "config.json").is_file()


def assert_profiled(folder: Path) -> None:
    """Rank 1's recording of the second step, by torch on the CPU and by torch_npu on the device; no other."""
    (on_cpu,) = (folder / "cpu" / "profile").rglob("*.json.gz")
    assert on_cpu.relative_to(folder / "cpu").as_posix() == "profile/step_2/actor_rollout_ref_rank_1.json.gz"
    assert_whole_step(on_cpu, {"megatron_cpu::adamw", "aten::mm"})
    (on_npu,) = (folder / "npu" / "profile" / "step_2").glob("actor_rollout_ref_rank_1_*_ascend_pt")
    recorded = (on_npu / "FRAMEWORK" / "torch.op_range").read_bytes()
    for name in (*PHASES, *PARTS, *MICRO_BATCHES, *NPU_OPS):
        assert name.encode() in recorded, name


def run_on_npu(num_steps: int, prepared: Prepared, folder: Path, *overrides: str) -> str:
    """The whole command to its good end; what it said."""
    kernels = folder / "kernels"
    kernels.mkdir(exist_ok=True)
    simulated = {"FAKE_NPU_COUNT": 2, "FAKE_NPU_CALLS_DIR": kernels, "PYTHONPATH": os.environ["PYTHONPATH"]}
    environment = prepared.environment(folder / "npu", STEPS=num_steps, **simulated)
    arguments = (*prepared.arguments, "--no-plan", "trainer.device=npu", *CHANGES, *overrides)
    with Command(folder / "npu.log", environment, arguments) as command:
        assert command.wait() == 0, command.tail(80)
        assert command.left_behind() == []
        return command.text()


def assert_costs(kernels: Path) -> None:
    """No op of a die's control processor in any phase, and no more waits of the host than ``WAITS`` says."""
    processes = [by_phase(read_calls(path)) for path in kernels.glob("*.phases")]
    trained = "update_actor/optimizer_step"
    workers = [phases for phases in processes if trained in phases and phases[trained].waits]  # not those on the CPU
    assert len(workers) == 2, report(processes[0])
    for phases in workers:
        assert not any(costs.control or costs.unknown for costs in phases.values()), report(phases)
        for name, most in WAITS.items():
            assert phases[name].times > 0 and phases[name].waits.total() <= most * phases[name].times, report(phases)


def assert_launches(config: PPOTrainerConfig, kernels: Path) -> None:
    """A plan of the run counts the launches of its steps and micro-batches."""
    plan = plan_rank(config, load_device("a3"), 0, StepSize(16, 16))
    planned = {launches.phase: launches.each for launches in plan.launches if launches.unit != "call"}
    names = {
        "prefill": "generate_sequences/prefill",
        "decode": "generate_sequences/decode",
        "update_actor": "update_actor/forward_backward",
    }
    for path in kernels.glob("*.phases"):
        calls = read_calls(path)
        times = {phase: count for phase, op, _, count in calls if not op}
        counted: Counter[str] = Counter()
        for phase, op, _, count in calls:
            counted[phase] += count if op and _is_launched(op) else 0
        if counted[names["update_actor"]]:  # not those on the CPU
            for name, phase in names.items():
                # Not every step finds the same work: samples end, tables of angles grow.
                assert planned[name] == pytest.approx(counted[phase] / times[phase], rel=LAUNCHES_APART), name


def assert_native(said: str, kernels: Path) -> None:
    """The tables in use are Ascend's, printed once, and their kernels are what ran in every worker."""
    training = (train_ops().names, reference_ops().names)
    rollout = (rollout_ops().implementations, reference_rollout_ops().implementations)
    for implementations, reference in (training, rollout):
        assert set(implementations) == set(reference)
        for name, kind in implementations.items():
            assert f"{name}={kind}" in said or f"{name} {kind}" in " ".join(said.split()), f"{name} is not in the log"
    workers = [set(path.read_text(encoding="utf-8").split()) for path in kernels.glob("*.txt")]
    trained = [ran for ran in workers if "aten::_fused_adamw_" in ran]
    assert len(trained) == 2, f"{len(trained)} processes ran the optimizer's kernel"
    for ran in trained:
        assert not KERNELS - ran, f"never ran on the device: {sorted(KERNELS - ran)}"


def _is_launched(op: str) -> bool:
    """Whether the host queues something for the op: it is neither a view nor memory without a value."""
    _, entry = _entry(op)
    return not (entry and entry.get("host")) and op != "aten::_local_scalar_dense"
