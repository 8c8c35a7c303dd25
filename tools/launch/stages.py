"""The commands of a run, in order: data, base model, conversions, driver, report. Nothing is started here."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from recipes.common.recipe import ROOT
from tools.launch.job import Job, config_path, has_shards, latest_step, model_dimensions


@dataclass(frozen=True)
class Stage:
    """One command of the run; a stage with a ``skip_reason`` has none, one that is optional may fail."""

    name: str
    title: str
    command: tuple[str, ...] = ()
    skip_reason: str | None = None
    is_optional: bool = False

    def shown(self) -> str:
        """The command as a line for a shell; the reason as a comment where there is none."""
        return f"# {self.title}: {self.skip_reason}" if self.skip_reason else shlex.join(self.command)


def module_stage(name: str, title: str, module: str, *arguments: object) -> Stage:
    """The stage that runs ``python -m module`` with these arguments as texts."""
    return Stage(name, title, (sys.executable, "-m", module, *map(str, arguments)))


def stages(job: Job) -> list[Stage]:
    """The stages before the training, in order: data, base model, BF16, shards."""
    settings = job.settings
    made = "base_model_fp8" if settings.recipe.tiny_model.is_fp8 else "base_model"
    published = settings.model_path or settings.output_dir / made
    if settings.model_path is None:
        arguments: list[object] = [settings.recipe.name, "--seed", settings.seed, "--output-dir", published]
        arguments += ["--train-parquet", settings.data_dir / "train.parquet"]
        if not job.config.actor_rollout_ref.actor.megatron.load_weight:
            arguments += ["--num-steps", 2]  # config and tokenizer are wanted, weights are not
        base_model = module_stage("base_model", "Base model", "recipes.common.base_model", *arguments)
    else:
        base_model = Stage("base_model", "Base model", skip_reason=f"MODEL_PATH is {settings.model_path}")
    return [*_data_stages(job), base_model, _bf16_stage(job, published), _sharding_stage(job)]


def _data_stages(job: Job) -> list[Stage]:
    """Generated problems where the recipe's input is wanted and not given; then parquet files."""
    settings, recipe = job.settings, job.settings.recipe
    inputs = replace(settings.recipe_inputs, max_prompt_length=job.config.data.max_prompt_length)
    if given := [text for text in settings.overrides if text.lstrip("+").startswith("data.train_files=")]:
        return [Stage("data", "Data", skip_reason=f"{given[-1]} is given")]
    needs_input = recipe.needs_input(inputs)
    if needs_input and settings.input_path is None and settings.model_path is not None and recipe.hub_input is not None:
        name, inner = recipe.hub_input
        directory = settings.output_dir / "hub" / name
        data = module_stage("data", "Data", recipe.data_module, *recipe.data_arguments(inputs, directory / inner))
        return [_fetch_stage(job, name, directory, directory / inner), data]
    source = settings.input_path or settings.data_dir / recipe.problems_output
    data = module_stage("data", "Data", recipe.data_module, *recipe.data_arguments(inputs, source))
    if settings.input_path is not None or not needs_input:
        return [data]
    arguments = ("--output", source, "--seed", settings.seed, *recipe.problems_arguments(inputs))
    return [module_stage("problems", "Problems", recipe.problems_module, *arguments), data]


def _fetch_stage(job: Job, name: str, directory: Path, folder: Path) -> Stage:
    """The data set from its hub; no network is needed once it is there."""
    title = "Data set from its hub"
    with suppress(ValueError):
        job.settings.recipe.check_input(folder)
        return Stage("fetch", title, skip_reason=f"it is in {directory}")
    return module_stage(
        "fetch", title, "tools.download", name, "--to", directory, "--source", job.settings.model_source
    )


def _bf16_stage(job: Job, published: Path) -> Stage:
    """The model without quantisation: its weights where they are read, else config and tokenizer alone."""
    name, title, bf16 = "fp8_to_bf16", "FP8 to BF16", job.model_dir
    if bf16 == published:
        return Stage(name, title, skip_reason=f"{bf16} is not quantised")
    if job.needs_weights or job.settings.model_path is None:
        paths = ["--input-fp8-hf-path", published, "--output-bf16-hf-path", bf16, "--resume"]
        return module_stage(name, title, "mindspeed_llm.fp8_cast_bf16", *paths, *_mtp_flags(job))
    title = "Config and tokenizer without quantisation; no weights are read"
    paths = ["--input-hf-path", published, "--output-hf-path", bf16]
    return module_stage(name, title, "mindspeed_llm.plain_config", *paths, *_mtp_flags(job))


def _mtp_flags(job: Job) -> list[object]:
    """The converters' flag for the prediction layers that the run has."""
    count = job.config.actor_rollout_ref.actor.megatron.override_transformer_config.get("mtp_num_layers")
    return ["--num-nextn-predict-layers", count] if count else []


def _sharding_stage(job: Job) -> Stage:
    settings, engine = job.settings, job.config.actor_rollout_ref.actor.megatron
    skip_reason = None
    if not engine.load_weight:
        skip_reason = "the config initialises at random (actor.megatron.load_weight is False)"
    elif not engine.use_dist_checkpointing:
        skip_reason = "workers read the BF16 files (actor.megatron.use_dist_checkpointing is False)"
    elif settings.dist_ckpt_path is not None and has_shards(settings.dist_ckpt_path):
        skip_reason = f"DIST_CKPT_PATH {settings.dist_ckpt_path} has shards, used as they are"
    if skip_reason is not None:
        return Stage("sharding", "Sharding", skip_reason=skip_reason)
    paths = ["--load-dir", job.model_dir, "--save-dir", settings.dist_ckpt_dir, *_mtp_flags(job), "--resume"]
    if settings.recipe.shards == "torch_dist":
        return module_stage("sharding", "Sharding", "mindspeed_llm.convert_ckpt_torch_dist", *paths)
    flags = ["--moe-grouped-gemm", "--target-tensor-parallel-size", engine.tensor_model_parallel_size]
    flags += ["--target-pipeline-parallel-size", engine.pipeline_model_parallel_size, *_slot_flags(job)]
    flags += ["--target-expert-parallel-size", engine.expert_model_parallel_size]
    flags += ["--moe-tp-extend-ep"] if engine.moe_tp_extend_ep else []
    return module_stage("sharding", "Sharding", "mindspeed_llm.convert_ckpt_deepseek3", *flags, *paths)


def _slot_flags(job: Job) -> list[str]:
    """The converter's flags for the layers of each pipeline stage; none for a layout that the checks refuse."""
    engine = job.config.actor_rollout_ref.actor.megatron
    num_layers = model_dimensions(job.settings).get("num_hidden_layers")
    try:
        counts = engine.layer_counts(num_layers)
        noops = engine.layout(job.config.trainer.world_size).noop_layers
    except ValueError:
        return []
    flags = ["--num-layer-list", ",".join(map(str, counts))] if counts is not None else []
    if noops:
        flags += ["--noop-layers", ",".join(map(str, noops))]
    num_chunks = (engine.virtual_pipeline_model_parallel_size or 1) * engine.pipeline_model_parallel_size
    if num_chunks > engine.pipeline_model_parallel_size and num_layers is not None:
        flags += ["--num-layers-per-virtual-pipeline-stage", str((num_layers + len(noops)) // num_chunks)]
    return flags


def nodes_stage(*arguments: str) -> Stage:
    """A command that waits for the other nodes, watches them or ends them; RAY_ADDRESS tells it the head."""
    return module_stage("nodes", "Nodes", "tools.launch.nodes", *arguments)


def driver_stage(job: Job) -> Stage:
    """The training: its controller is a process of its own."""
    directory, name = config_path(job.settings)
    arguments = ("--config-dir", directory, "--config-name", name, *job.overrides)
    return module_stage("main_ppo", "GRPO", "verl.trainer.main_ppo", *arguments)


def live_stage(job: Job, port: int) -> Stage:
    """The page that shows the run while the driver trains."""
    arguments = ("--run-dir", job.settings.output_dir, "--serve", port)
    return module_stage("live_report", "Live report", "tools.report", *arguments)


def closing_stages(job: Job) -> list[Stage]:
    """The stages after the training: back to Hugging Face form where the recipe wants it, then the report."""
    report = module_stage("report", "Results", "tools.report", "--run-dir", job.settings.output_dir)
    is_trained = not job.config.trainer.rollout_only
    export = [_export_stage(job)] if job.settings.recipe.converts_back and is_trained else []
    return [*export, replace(report, is_optional=True)]  # the training is done and saved, whatever becomes of it


def export_dir(job: Job) -> Path:
    """The trained model as a Hugging Face directory: the converter's where there is one, else the driver's."""
    if not job.settings.recipe.converts_back:
        return ROOT / job.config.trainer.report_dir / "export_hf"
    return job.settings.output_dir / "trained_hf" / f"global_step_{_last_step(job)}"


def _last_step(job: Job) -> str:
    return latest_step(Path(job.config.trainer.default_local_dir)) or "<last>"


def _export_stage(job: Job) -> Stage:
    """The conversion of the last checkpoint, in torch-dist shards, to an HF directory; call it when that is written."""
    actor = Path(job.config.trainer.default_local_dir) / f"global_step_{_last_step(job)}" / "actor"
    paths = ["--load-dir", actor, "--hf-config-dir", job.model_dir, "--save-dir", export_dir(job), "--resume"]
    module = "mindspeed_llm.convert_ckpt_deepseek3_mcore2hf"
    return module_stage("shards_to_hf", "Shards to Hugging Face", module, *paths)
