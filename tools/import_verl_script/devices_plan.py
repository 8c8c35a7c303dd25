"""The plan of the run that a script describes, on the devices that it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tools.import_verl_script.verdicts import Judgement
from tools.plan.devices import load_device
from tools.plan.setup import MODELS, known_models, planned_run
from tools.plan.timing.constants import load_constants
from tools.plan.timing.cost import predict
from tools.plan.timing.run_shape import RunShape, default_lengths
from verl.trainer.config.load import CONFIG_DIR


def plan_lines(judgement: Judgement, device_name: str | None, model: str | None) -> tuple[list[str], bool]:
    """What a plan says in a few lines, and whether the run may fit: True where there is no plan."""
    config, line = judgement.config, judgement.line
    assert config is not None and line is not None
    trainer = config.trainer
    if device_name is None:
        device_name = ("a2" if trainer.n_gpus_per_node <= 8 else "a3") if trainer.device == "npu" else "h100"
    path = config.actor_rollout_ref.model.path
    folder = Path(path).expanduser()
    if model is None and not (folder / "config.json").is_file() and (model := known_model(path)) is None:
        return [
            f"no plan: it needs config.json of {path}, which is not here: hf download {path} config.json "
            "--local-dir DIR, then --model DIR"
        ], True
    try:
        device = load_device(device_name)
        file = (line.config_dir or CONFIG_DIR) / f"{line.config_name}.yaml"
        run = planned_run(str(file), line.overrides, device, nodes=None, model=model)
    except ValueError as error:
        return [f"no plan: {error}"], True
    from tools.plan.training import StepSize  # these load torch
    from tools.plan.whole import GIB, plan_run
    from verl.trainer.device_room import fit_to_devices

    try:
        fitted, changed = fit_to_devices(run.config, device.memory_bytes)
    except ValueError as error:
        return [f"does not work on {device.name}: {error}"], False
    run = replace(run, config=fitted)

    size = StepSize(config.data.max_prompt_length, config.data.max_response_length, 1.0)
    plan = plan_run(run, size)
    step = predict(RunShape.of(run.config, run.hf, default_lengths(run.config), run.name), device, load_constants())
    where = f"on {trainer.nnodes} x {trainer.n_gpus_per_node} {device.name} (--device for others)"
    source = f", with tools/plan/models/{model}" if model and (MODELS / model).is_dir() else ""
    if plan.problems:
        return [f"does not work {where}{source}", *plan.problems], False
    free = f"{plan.headroom_bytes / GIB:.1f} of {device.budget_bytes / GIB:.1f} GiB of the fullest device stay free"
    return [
        f"fits {where}{source}: {free}; a step is predicted to take {step.total_s:,.0f} s",
        *([changed] if changed else []),
    ], True


def known_model(path: str) -> str | None:
    """The planner's own copy of a model's config.json, by the last part of a path or a hub's name."""
    name = path.rstrip("/").rpartition("/")[2].lower().replace("-", "_")
    known = [model for model in known_models() if name == model or name.startswith(f"{model}_")]
    return max(known, key=len, default=None)
