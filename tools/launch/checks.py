"""The checks before anything starts: every problem that they find goes into one message."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hf_formats.config import load_hf_config
from hf_formats.cores import threads_per_worker
from hf_formats.tokenizer import CONFIG_FILE, FAST_FILE, tokenizer_problem
from recipes.common.recipe import Recipe
from recipes.common.short_folder import environment_problem, folder_problem
from tools.download import missing_package
from tools.launch import network
from tools.launch.job import Job, has_shards, is_fp8, model_dimensions
from tools.launch.roles import NodeRole
from tools.launch.settings import Settings
from tools.launch.stages import stages
from tools.plan.devices import load_device
from verl.trainer.config.checks import missing_dispatcher
from verl.trainer.config.config import PPOTrainerConfig
from verl.trainer.config.data import file_list
from verl.trainer.config.validate import validate_config
from verl.utils.parquet import schema_problems
from verl.utils.reward_score.static_check import file_problem
from verl.utils.trackers import missing_packages

LEAST_FREE_BYTES = 2**30


def problems(job: Job, role: NodeRole) -> list[str]:
    """Every reason why this node cannot take part in the run, one text each; empty when it can."""
    found = [*config_problems(job), *host_problems(job), *device_problems(job)]
    found += setting_problems(job.settings, role)
    if role.is_head:
        if job.settings.model_path is not None and not model_problems(job.settings.model_path):
            found += weight_problems(job, job.settings.model_path)
        found += [*live_problems(job), *hub_problems(job), *parquet_problems(job)]
        found += [*reward_problems(job), *plugin_problems(job), *resume_problems(job)]
    return found


def setting_problems(settings: Settings, role: NodeRole) -> list[str]:
    """The part of ``problems`` that needs no config."""
    found = writable_problems("OUTPUT_DIR", settings.output_dir)
    found += filter(None, [folder_problem(), environment_problem()])
    if settings.plan_device is not None:
        found += _refusals("PLAN_DEVICE", lambda: load_device(str(settings.plan_device)))
    found += _refusals("", lambda: threads_per_worker(1))
    if settings.dist_ckpt_path is not None and not has_shards(settings.dist_ckpt_path):
        found += writable_problems("DIST_CKPT_PATH", settings.dist_ckpt_path)
    if role.is_head:
        ports = {"RAY_PORT": settings.ray_port, "MASTER_PORT": settings.master_port}
        found += [text for name, port in ports.items() if port and (text := network.port_problem(name, port))]
        if settings.ray_port is not None and settings.master_port == settings.ray_port:
            found.append(f"RAY_PORT and MASTER_PORT are both {settings.ray_port}; give each a port of its own")
        if settings.input_path is not None:
            found += input_problems(settings.recipe, settings.input_path)
        if settings.model_path is not None:
            found += model_problems(settings.model_path)
    return found


def live_problems(job: Job) -> list[str]:
    """Whether the live report's port is free on this node, and nothing else of the run will want it."""
    name, port = "trainer.live_report", job.config.trainer.live_report
    if not port:
        return []
    others = {"RAY_PORT": job.ray_port, "MASTER_PORT": job.settings.master_port}
    found = [
        f"{name} and {other} are both {port}; give each a port of its own" for other in others if others[other] == port
    ]
    problem = network.port_problem(name, port)
    return [*found, problem] if problem else found


def reward_problems(job: Job) -> list[str]:
    """Faults of the reward functions' files; the driver's own check runs them, once the data is there."""
    custom, where = job.config.custom_reward_function, "custom_reward_function"
    named = {} if custom.default is None else {f"{where}.path": custom.default}
    named |= {f"{where}.by_data_source.{source}": spec for source, spec in custom.sources.items()}
    found = {key: file_problem(spec) for key, spec in named.items()}
    return [f"{key}: {problem}" for key, problem in found.items() if problem is not None]


def plugin_problems(job: Job) -> list[str]:
    """Trackers and a dispatcher without their packages, and faults of the user's other code, whose files run here."""
    config = job.config
    found = [*missing_packages(config.trainer.logger), *missing_dispatcher(config)]
    classes = (config.data.custom_cls.path, config.data.sampler.class_path, config.algorithm.filter_groups.filter_path)
    others = (config.reward_model.manager_path, config.actor_rollout_ref.model.external_lib, config.trainer.train_only)
    if not any((*classes, *others)):
        return found
    from verl.trainer import preflight  # it imports torch

    return [*found, *preflight.plugin_problems(config)]


def resume_problems(job: Job) -> list[str]:
    """Whether the checkpoint that the user names is there and complete."""
    trainer = job.config.trainer
    if trainer.resume_mode != "resume_path" or not trainer.resume_from_path:
        return []
    from verl.trainer.ppo.checkpointing import resume_problem  # it imports torch

    problem = resume_problem(trainer.resume_from_path)
    return [] if problem is None else [problem]


def input_problems(recipe: Recipe, path: Path) -> list[str]:
    """Faults of the recipe's input, with the name of its variable for the data script's option."""
    option = f"--{recipe.input_variable.lower()}"
    return [text.replace(option, recipe.input_variable, 1) for text in _refusals("", lambda: recipe.check_input(path))]


def host_problems(job: Job) -> list[str]:
    """Whether NNODES nodes can hold those that train and those that only generate."""
    trains, generates, count = job.config.trainer.nnodes, job.rollout_nnodes, job.nnodes
    least = max(trains, generates)
    if not generates or least <= count <= job.most_nnodes:
        return []
    return [
        f"NNODES is {count}; trainer.nnodes {trains} and rollout.nnodes {generates} take {job.most_nnodes} nodes, or "
        f"as few as {least} that do both"
    ]


def device_problems(job: Job) -> list[str]:
    """Whether this node has the GPUs that the config asks of every node."""
    if job.device != "cuda":
        return []
    import torch

    count, wanted = torch.cuda.device_count(), job.npus_per_node
    asking = f"trainer.n_gpus_per_node is {job.config.trainer.n_gpus_per_node}"
    if job.rollout_nnodes:
        asking += f", rollout.n_gpus_per_node is {job.config.rollout.n_gpus_per_node}, a node needs {wanted}"
    return [f"{asking}, and torch sees {count} GPUs on this node: set NPUS_PER_NODE"] if count < wanted else []


def hub_problems(job: Job) -> list[str]:
    """Whether the data set can be fetched from its hub, where a stage will."""
    is_fetched = any(stage.name == "fetch" and stage.skip_reason is None for stage in stages(job))
    hub = job.settings.model_source
    advice = missing_package(hub) if is_fetched else None
    return [] if advice is None else [f"MODEL_SOURCE={hub} {advice}; or set {job.settings.recipe.input_variable}"]


def writable_problems(name: str, path: Path) -> list[str]:
    """Whether files can be made in ``path`` (it, or its nearest parent that exists), and whether the disk has room."""
    folder = next(parent for parent in (path, *path.parents) if parent.exists())
    if not folder.is_dir():
        return [f"{name} {path}: {folder} is not a directory; choose a directory on a disk that you can write to"]
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".recipe_write_test"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return [f"{name} {path}: cannot write to {folder} ({error.strerror}); choose a directory that you can write to"]
    if free >= LEAST_FREE_BYTES:
        return []
    return [f"{name} {path}: {free / 2**20:.0f} MiB are free there; expected at least {LEAST_FREE_BYTES / 2**20:.0f}"]


def parquet_problems(job: Job) -> list[str]:
    """Faults of the parquet files that the user names; the data stage's own do not exist yet."""
    if job.config.data.custom_cls.path is not None:
        return []  # a class of a user knows the form of its files
    data, folder = job.config.data, job.settings.data_dir
    is_made = any(stage.name == "data" and stage.skip_reason is None for stage in stages(job))
    return [
        f"{key}: {problem}"
        for key, files in {"data.train_files": data.train_files, "data.val_files": data.val_files}.items()
        for path in file_list(files)
        if not is_made or not Path(path).is_relative_to(folder)
        for problem in schema_problems(path, data.prompt_key)
    ]


def config_problems(job: Job) -> list[str]:
    """Faults of the config, also for a model whose BF16 form does not exist yet: the tiny one, or a quantised one."""
    path, dims = job.settings.model_path, model_dimensions(job.settings)
    if path is not None and dims and _refusals("MODEL_PATH", lambda: load_hf_config(path)):
        return validate_config(_with_model(job, path / "unsupported"))  # reported; what follows from it is not advice
    found = validate_config(job.config)
    if path is not None and not is_fp8(path):
        return found
    with_model = _with_model(job, path or job.settings.recipe.tiny_model.directory)
    where = f"MODEL_PATH {path}" if path else "without MODEL_PATH the model is the tiny one"
    size = f"({dims.get('num_hidden_layers')} layers, {dims.get('n_routed_experts')} experts)"
    advice = "change the layout" if path else "set MODEL_PATH, or change the layout"
    of_model = [problem for problem in validate_config(with_model) if problem not in found]
    return [*found, *(f"{where} {size}: {problem}; {advice}" for problem in of_model)]


def _with_model(job: Job, path: Path) -> PPOTrainerConfig:
    models = job.config.actor_rollout_ref
    return replace(job.config, actor_rollout_ref=replace(models, model=replace(models.model, path=str(path))))


def model_problems(path: Path) -> list[str]:
    """Missing files of an HF directory, and what its config.json asks for that the engines do not have."""
    missing = [name for name in ("config.json", FAST_FILE, CONFIG_FILE) if not (path / name).is_file()]
    found = []
    if missing in ([], [FAST_FILE]) and (problem := tokenizer_problem(path)):
        found = [f"MODEL_PATH: {problem}"]
    elif missing:
        found = [f"MODEL_PATH {path} has no {' and no '.join(missing)}; expected a Hugging Face model directory"]
    return found if "config.json" in missing else [*found, *_refusals("MODEL_PATH", lambda: load_hf_config(path))]


def weight_problems(job: Job, path: Path) -> list[str]:
    """Missing and truncated shards of an HF directory that ``model_problems`` finds nothing wrong with."""
    if not job.needs_weights:
        return []
    from mindspeed_llm.hf_checkpoint import HFCheckpoint  # it imports torch

    return _refusals("MODEL_PATH", lambda: HFCheckpoint(path).close())


def _refusals(name: str, read: Callable[[], object]) -> list[str]:
    """Why the variable's file cannot be read, as ``read`` says; an empty name where that has the name itself."""
    try:
        read()
    except (ValueError, OSError) as error:
        return [f"{name}: {error}" if name else str(error)]
    return []
