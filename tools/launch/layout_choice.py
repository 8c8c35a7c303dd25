"""The layout of a recipe that takes any model: chosen by the planner, and kept in OUTPUT_DIR for the next start.

A choice holds until the model, the devices or the settings that it was made for change; then it is made again. No
checkpoint stands against that, as any layout reads it; only the same layout continues bit for bit. On a CPU the dtype
is chosen with it, by measurement, and holds as long as OUTPUT_DIR does.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hf_formats.files import write_json
from recipes.common.data_scripts import digest_of
from tools.launch.dtype_choice import chosen_dtypes, dtypes_in
from tools.launch.first_plan import plan_command, run_planner
from tools.launch.job import Job, latest_step, resolve_config
from tools.plan.devices import load_device

FILE = "layout.json"
# Keys that no layout depends on: paths and seeds.
_APART = {"path", "dist_checkpointing_path", "seed"}
_OF_A_LAYOUT = ("parallel", "actor.megatron.")
_DATA = ("train_batch_size", "gen_batch_size", "max_prompt_length", "max_response_length")


@dataclass(frozen=True)
class LayoutChoice:
    """overrides: of the config · reasons: the planner's sentences · made_for: what it depends on, by name · note: where
    it comes from.
    """

    overrides: tuple[str, ...]
    reasons: tuple[str, ...]
    made_for: Mapping[str, str]
    note: str

    @property
    def lines(self) -> tuple[str, ...]:
        """What a user reads of it."""
        return (f"layout: {self.note}", *(f"  {reason}" for reason in self.reasons))

    def applied(self, job: Job) -> Job:
        """The job with this layout, over which the user's overrides stand."""
        settings = replace(job.settings, chosen=self.overrides)
        return Job(settings, resolve_config(settings))

    def write(self, output_dir: Path) -> None:
        """Keep it; a choice without reasons (--no-plan) is none."""
        if self.reasons:
            content = {"made_for": self.made_for, "overrides": self.overrides, "reasons": self.reasons}
            write_json(output_dir / FILE, content)


def without_layout(job: Job) -> Job:
    """The job without what the user gives of its layout, which alone may be none."""
    overrides = tuple(text for text in job.settings.overrides if not any(mark in text for mark in _OF_A_LAYOUT))
    settings = replace(job.settings, overrides=overrides)
    return Job(settings, resolve_config(settings))


def choose_layout(job: Job, may_plan: bool, report: Callable[[str], object]) -> LayoutChoice:
    """The kept choice where it still holds, else the planner's; ``may_plan`` False leaves the config's own layout.

    ``report`` is called where the planner, which takes a while, is started. ValueError: nothing fits, or the planner
    cannot say.
    """
    path = job.settings.output_dir / FILE
    kept = _kept(path)
    dtypes = dtypes_in(kept.overrides) if kept is not None else _measured_dtypes(job) if may_plan else ()
    if dtypes:
        settings = replace(job.settings, chosen=dtypes)
        job = Job(settings, resolve_config(settings))
    with tempfile.TemporaryDirectory(prefix="layout-") as folder:
        scratch = Path(folder)
        result = scratch / "choice.json"
        try:
            command = plan_command(job, scratch, "--choose", str(result))
            made_for = _made_for(job, command)
        except ValueError as error:
            raise ValueError(_cannot(error)) from error
        changed = [name for name, text in made_for.items() if kept is not None and kept.made_for.get(name) != text]
        if kept is not None and not changed:
            return kept
        if not may_plan:
            own = f"--no-plan: the config's own, on {job.npus_per_node} {job.device} device(s); nothing is chosen"
            return LayoutChoice(dtypes, (), made_for, f"{own}, because {path} is {_stale(changed)}")
        report(f"the planner chooses a layout for {made_for['devices']} ...")
        try:
            run_planner(command, result)
        except ValueError as error:
            raise ValueError(_cannot(error)) from error
        found = json.loads(result.read_text(encoding="utf-8"))
    if not found["overrides"]:
        raise ValueError("\n  ".join([f"no layout fits {made_for['devices']}:", *found["reasons"]]))
    note = f"chosen for {made_for['devices']}"
    if changed:
        step = latest_step(Path(job.config.trainer.default_local_dir))
        of_checkpoint = "" if step is None else f"; the checkpoint of step {step} is read into the new layout"
        note += f"; {path} was {_stale(changed)}{of_checkpoint}"
    reasons = [f"{text}: on this CPU the quicker one, by a margin" for text in dtypes]
    return LayoutChoice((*dtypes, *found["overrides"]), (*reasons, *found["reasons"]), made_for, note)


def _measured_dtypes(job: Job) -> tuple[str, ...]:
    """On a CPU the overrides of the dtypes that are right there, unless the user gives one."""
    is_open = job.device == "cpu" and not dtypes_in(job.settings.overrides)
    return chosen_dtypes(job.npus_per_node) if is_open else ()


def _stale(changed: Collection[str]) -> str:
    return f"for other {' and '.join(changed)}" if changed else "not there"


def _cannot(error: ValueError) -> str:
    return f"no layout can be chosen: {error}; --no-plan starts with the config's own, which overrides can change"


def _made_for(job: Job, command: list[str]) -> dict[str, str]:
    """Name -> what a choice depends on: the devices as a text, the others as digests."""
    config, model = job.config, Path(command[command.index("--model") + 1])
    device = load_device(command[command.index("--device") + 1])
    data = asdict(config.data)
    settings = {
        "models": _without_apart(asdict(config.actor_rollout_ref)),
        "algorithm": asdict(config.algorithm),
        "data": {key: data[key] for key in _DATA},
    }
    return {
        "devices": f"{config.trainer.nnodes} x {config.trainer.n_gpus_per_node} {device.name} of "
        f"{device.memory_gib:.1f} GiB",
        "model": digest_of(json.loads((model / "config.json").read_text(encoding="utf-8")), []),
        "settings": digest_of(settings, []),
    }


def _without_apart(tree: dict[str, Any]) -> dict[str, Any]:
    return {
        key: _without_apart(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if key not in _APART
    }


def _kept(path: Path) -> LayoutChoice | None:
    """The choice of an earlier start; ValueError for a file that is none."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        overrides, reasons = (tuple(map(str, content[key])) for key in ("overrides", "reasons"))
        return LayoutChoice(overrides, reasons, dict(content["made_for"]), f"kept in {path} from an earlier start")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a layout that the launcher has written ({error}); remove it") from error
