"""Which commands a run consists of, in which environment: pure functions from settings and config, nothing starts."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.common.base_model import HF_CONFIG
from recipes.common.launcher.settings import Place, Settings
from recipes.common.recipe import ROOT

if TYPE_CHECKING:
    from verl.trainer.config.config import PPOTrainerConfig

NPU_ENV_FILE = Path(__file__).resolve().parents[1] / "npu_env.sh"
CPU_OBJECT_STORE_BYTES = 256 * 2**20
_EXPORT = re.compile(r'^export (?P<name>\w+)="\$\{\w+:-(?P<value>[^}]*)\}"')


@dataclass(frozen=True)
class Stage:
    """One command of the job; ``why_not`` says why there is nothing to run."""

    name: str
    title: str
    command: tuple[str, ...] = ()
    why_not: str | None = None

    def shown(self) -> str:
        """The command as a line for a shell."""
        return shlex.join(self.command)


@dataclass(frozen=True)
class RayPorts:
    """Ports of Ray on one node beside the head's; None lets this launcher choose free ones at start."""

    client_server: int | None = None
    dashboard: int | None = None
    dashboard_agent: int | None = None


@dataclass(frozen=True)
class Job:
    """A run: its settings, the resolved config, and the number of nodes and devices that follow from both."""

    settings: Settings
    config: PPOTrainerConfig
    python: str = field(default=sys.executable)

    @property
    def rollout_nnodes(self) -> int:
        """Nodes of ranks that only generate, where the schedule has some."""
        return _rollout_nnodes(self.config)

    @property
    def most_nnodes(self) -> int:
        """Nodes where no two roles share one."""
        return self.config.trainer.nnodes + self.rollout_nnodes

    @property
    def nnodes(self) -> int:
        """Number of nodes: those that train, and those that only generate unless NNODES says that nodes do both."""
        given = self.settings.nnodes if self.rollout_nnodes else None
        return self.most_nnodes if given is None else given

    @property
    def npus_per_node(self) -> int:
        """Devices, and so worker processes, on each node."""
        trainer, rollout = self.config.trainer, self.config.rollout
        if not self.rollout_nnodes:
            return trainer.n_gpus_per_node
        if self.nnodes < self.most_nnodes:
            return trainer.n_gpus_per_node + rollout.n_gpus_per_node
        return max(trainer.n_gpus_per_node, rollout.n_gpus_per_node)

    @property
    def device(self) -> str:
        """npu, cuda or cpu: the config's, or what this machine has where the config leaves it open."""
        asked = self.config.trainer.device
        return asked if asked != "auto" else self.settings.accelerator


def config_place(settings: Settings) -> tuple[Path, str]:
    """Folder and name of the config: CONFIG_NAME is one of the recipe's, or the path of a YAML file."""
    given = Path(settings.config_name)
    if given.suffix == ".yaml" or len(given.parts) > 1:
        path = given.expanduser().absolute()
        return path.parent, path.stem
    return settings.recipe.config_dir, settings.config_name


def run_overrides(settings: Settings, rollout_nnodes: int = 0) -> list[str]:
    """Hydra overrides that follow from the settings, then the user's own, which win.

    rollout_nnodes: how many of NNODES only generate; where that leaves none to train, nodes do both.
    """
    out = settings.output_dir
    model = model_dir(settings)
    derived: dict[str, object] = {
        "data.train_files": out / "data" / "train.parquet",
        **{f"data.{key}": path for key, path in val_files(settings).items()},
        "data.seed": settings.seed,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.megatron.dist_checkpointing_path": settings.dist_ckpt_dir,
        "actor_rollout_ref.actor.megatron.seed": settings.seed,
        "actor_rollout_ref.rollout.seed": settings.seed,
        "custom_reward_function.path": settings.recipe.reward_path,
        "trainer.default_local_dir": out / "checkpoints",
        "trainer.report_dir": out,
    }
    if settings.steps is not None:
        derived["trainer.total_training_steps"] = settings.steps
    if settings.nnodes is not None and settings.nnodes > rollout_nnodes:
        derived["trainer.nnodes"] = settings.nnodes - rollout_nnodes
    if settings.npus_per_node is not None:
        derived["trainer.n_gpus_per_node"] = settings.npus_per_node
    return [*(f"{key}={_quoted(value)}" for key, value in derived.items()), *settings.overrides]


def val_files(settings: Settings) -> dict[str, Path]:
    """What the data stages make to evaluate on, by key below ``data``: a set of every name, or one file."""
    names = settings.recipe.eval_sets(settings)
    if not names:
        return {"val_files": settings.data_dir / "test.parquet"}
    return {f"val_files.{name}": settings.data_dir / "eval" / f"{name}.parquet" for name in names}


def _quoted(value: object) -> str:
    """A value as Hydra's override grammar takes it: paths may hold characters that it would read as syntax."""
    if isinstance(value, Path) and not re.fullmatch(r"[\w./@+-]+", str(value)):
        text = str(value).replace("\\", "\\\\").replace("'", "\\'")
        return f"'{text}'"
    return str(value)


def resolve_config(settings: Settings) -> PPOTrainerConfig:
    """The run's config, typed; ConfigError (a ValueError) lists every unknown key and wrong type."""
    from verl.trainer.config.load import load_config

    directory, name = config_place(settings)
    config = load_config(run_overrides(settings), config_name=name, config_dir=directory)
    if settings.nnodes is None or not (rollout_nnodes := _rollout_nnodes(config)):
        return config
    return load_config(run_overrides(settings, rollout_nnodes), config_name=name, config_dir=directory)


def _rollout_nnodes(config: PPOTrainerConfig) -> int:
    return max(0, config.rollout.nnodes) if config.has_rollout_ranks else 0


def is_fp8(model_path: Path) -> bool:
    """Whether an HF directory's config says that its weights are quantised."""
    return "quantization_config" in _hf_config(model_path)


def model_dir(settings: Settings) -> Path:
    """The BF16 HF directory that tokenizer, dimensions and, without shards, weights are read from."""
    if settings.model_path is not None and not is_fp8(settings.model_path):
        return settings.model_path
    return settings.output_dir / "base_model_bf16"


def stages(job: Job) -> list[Stage]:
    """Stages 1 to 4, in order: what is done before Ray starts."""
    settings, python = job.settings, job.python
    published = settings.model_path or settings.output_dir / "base_model_fp8"
    out = [*_data_stages(job)]
    if settings.model_path is None:
        command = [python, "-m", "recipes.common.base_model", settings.recipe.name, "--seed", str(settings.seed)]
        command += ["--train-parquet", str(settings.data_dir / "train.parquet"), "--output-dir", str(published)]
        if not job.config.actor_rollout_ref.actor.megatron.load_weight:
            command += ["--num-steps", "2"]  # config and tokenizer are wanted, weights are not
        out.append(Stage("base_model", "Base model", tuple(command)))
    else:
        out.append(Stage("base_model", "Base model", why_not=f"MODEL_PATH is {settings.model_path}"))
    if model_dir(settings) == settings.model_path:
        out.append(Stage("fp8_to_bf16", "FP8 to BF16", why_not=f"{settings.model_path} is not quantised"))
    else:
        command = [python, "-m", "mindspeed_llm.fp8_cast_bf16", "--input-fp8-hf-path", str(published)]
        command += ["--output-bf16-hf-path", str(model_dir(settings)), "--resume"]
        out.append(Stage("fp8_to_bf16", "FP8 to BF16", tuple(command)))
    out.append(_sharding_stage(job))
    return out


def _data_stages(job: Job) -> list[Stage]:
    given = [text for text in job.settings.overrides if text.lstrip("+").startswith("data.train_files=")]
    if given:
        return [Stage("data", "Data", why_not=f"{given[-1]} is given")]
    return job.settings.recipe.data_stages(job)


def _sharding_stage(job: Job) -> Stage:
    settings, engine = job.settings, job.config.actor_rollout_ref.actor.megatron
    name, title = "sharding", "Sharding"
    if not engine.load_weight:
        return Stage(name, title, why_not="the config initialises at random (actor.megatron.load_weight is False)")
    if not engine.use_dist_checkpointing:
        return Stage(
            name, title, why_not="workers read the BF16 files (actor.megatron.use_dist_checkpointing is False)"
        )
    if settings.dist_ckpt_path is not None and has_shards(settings.dist_ckpt_path):
        return Stage(name, title, why_not=f"DIST_CKPT_PATH {settings.dist_ckpt_path} has shards, used as they are")
    paths = ["--load-dir", str(model_dir(settings)), "--save-dir", str(settings.dist_ckpt_dir), "--resume"]
    if settings.recipe.shards == "torch_dist":
        return Stage(name, title, (job.python, "-m", "mindspeed_llm.convert_ckpt_torch_dist", *paths))
    command = [job.python, "-m", "mindspeed_llm.convert_ckpt_deepseek3", "--moe-grouped-gemm"]
    command += ["--target-tensor-parallel-size", str(engine.tensor_model_parallel_size)]
    command += ["--target-pipeline-parallel-size", str(engine.pipeline_model_parallel_size)]
    command += _slot_flags(job)
    command += ["--target-expert-parallel-size", str(engine.expert_model_parallel_size)]
    if engine.moe_tp_extend_ep:
        command.append("--moe-tp-extend-ep")
    return Stage(name, title, (*command, *paths))


def _slot_flags(job: Job) -> list[str]:
    """The converter's flags for which layer lies in which pipeline stage; none for a layout that the checks refuse."""
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


def model_dimensions(settings: Settings) -> Mapping[str, Any]:
    """The config.json of the model that the run starts from; empty when it cannot be read, which the checks report."""
    return HF_CONFIG if settings.model_path is None else _hf_config(settings.model_path)


def _hf_config(model_path: Path) -> Mapping[str, Any]:
    """The config.json of an HF directory; empty when it cannot be read, which the checks report."""
    try:
        found: dict[str, Any] = json.loads((model_path / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return found


def has_shards(directory: Path) -> bool:
    """Whether a folder holds rank files in MindSpeed-LLM's layout, or a distributed checkpoint."""
    if not directory.is_dir():
        return False
    return (directory / ".metadata").is_file() or next(directory.glob("**/mp_rank_*"), None) is not None


def driver_stage(job: Job) -> Stage:
    """Stage 6: the controller of the training, in a process of its own."""
    directory, name = config_place(job.settings)
    command = (job.python, "-m", "verl.trainer.main_ppo", "--config-dir", str(directory), "--config-name", name)
    return Stage("main_ppo", "GRPO", (*command, *run_overrides(job.settings, job.rollout_nnodes)))


def closing_stages(job: Job) -> list[Stage]:
    """What is done when the training is over: the way back to Hugging Face form, curves, report and closing summary."""
    report = (job.python, "-m", "tools.report", "--run-dir", str(job.settings.output_dir))
    is_trained = not job.config.trainer.rollout_only
    way_back = [_way_back_stage(job)] if job.settings.recipe.converts_back and is_trained else []
    return [*way_back, Stage("report", "Results", report)]


def _way_back_stage(job: Job) -> Stage:
    """The last checkpoint, torch-dist shards as training wrote them, as an HF directory; asked for when it is there."""
    checkpoints = Path(job.config.trainer.default_local_dir)
    latest = checkpoints / "latest_checkpointed_iteration.txt"
    step = latest.read_text(encoding="utf-8").strip() if latest.is_file() else "<last>"
    command = [job.python, "-m", "mindspeed_llm.convert_ckpt_deepseek3_mcore2hf"]
    command += ["--load-dir", str(checkpoints / f"global_step_{step}" / "actor")]
    command += ["--hf-config-dir", str(model_dir(job.settings))]
    command += ["--save-dir", str(job.settings.output_dir / "trained_hf" / f"global_step_{step}"), "--resume"]
    return Stage("way_back", "Shards to Hugging Face", tuple(command))


def ray_command(job: Job, place: Place, temp_dir: str, ports: RayPorts) -> tuple[str, ...]:
    """``ray start`` of one node, in the foreground, so that it lives and ends with this launcher."""
    settings = job.settings
    command = [job.python, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats"]
    command += ["--node-ip-address", place.own_addr, "--temp-dir", temp_dir]
    if place.is_head:
        command += ["--head", "--port", str(settings.ray_port), "--dashboard-host", "127.0.0.1"]
        command += ["--dashboard-port", _port(ports.dashboard), "--ray-client-server-port", _port(ports.client_server)]
    else:
        command += ["--address", f"{place.master_addr}:{settings.ray_port}"]
    command += ["--dashboard-agent-listen-port", _port(ports.dashboard_agent)]
    command += ["--min-worker-port", "0", "--max-worker-port", "0"]  # any free port: its own range collides with others
    command += ["--num-cpus", str(max(os.cpu_count() or 1, job.npus_per_node + 4))]
    if job.device == "npu":
        command += ["--resources", json.dumps({"NPU": job.npus_per_node})]
    elif job.device == "cuda":
        command += ["--num-gpus", str(job.npus_per_node)]
    else:
        command += ["--object-store-memory", str(CPU_OBJECT_STORE_BYTES)]
    return tuple(command)


def _port(port: int | None) -> str:
    return "<free port>" if port is None else str(port)


def ray_nodes_command(job: Job, place: Place, addresses: list[str]) -> tuple[str, ...]:
    """The command that waits until Ray knows all nodes."""
    address = f"{place.master_addr}:{job.settings.ray_port}"
    command = (job.python, "-m", "recipes.common.launcher.ray_nodes", "--address", address)
    return (*command, "--expect", ",".join(addresses), "--timeout-s", f"{job.settings.join_timeout_s:g}")


def npu_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What ``npu_env.sh`` exports, a variable that is set already keeping its value."""
    found = {}
    for line in NPU_ENV_FILE.read_text(encoding="utf-8").splitlines():
        match = _EXPORT.match(line.strip())
        if match:
            found[match["name"]] = environment.get(match["name"]) or match["value"]
    return found


def run_variables(job: Job, place: Place, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that this launcher sets for Ray, the workers and the driver; the token comes on top."""
    settings = job.settings
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]),
        "RAY_ADDRESS": f"{place.master_addr}:{settings.ray_port}",
        "RAY_AUTH_MODE": "token",
        "RAY_COLOR_PREFIX": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_worker_prestart": "0",
        "HYDRA_FULL_ERROR": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": place.interface,
        "TP_SOCKET_IFNAME": place.interface,
        "no_proxy": _no_proxy(place, environment),
    }
    variables["NO_PROXY"] = variables["no_proxy"]
    if settings.master_port is not None:
        variables["MASTER_PORT"] = str(settings.master_port)
    if job.device == "npu":
        variables["HCCL_SOCKET_IFNAME"] = place.interface
        variables |= npu_variables(environment)
    elif job.device == "cuda":
        variables["NCCL_SOCKET_IFNAME"] = place.interface
    else:
        threads = max(1, (os.cpu_count() or 1) // job.npus_per_node)
        variables["OMP_NUM_THREADS"] = environment.get("OMP_NUM_THREADS") or str(threads)
        variables["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    return variables


def _no_proxy(place: Place, environment: Mapping[str, str]) -> str:
    """Ray's gRPC would send even the node's own address to a proxy."""
    given = (environment.get("no_proxy") or environment.get("NO_PROXY") or "").split(",")
    own = ["localhost", "127.0.0.1", place.master_addr, place.own_addr]
    return ",".join(dict.fromkeys(filter(None, [*given, *own])))
