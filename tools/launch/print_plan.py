"""``--print-plan``: every command, environment variable and resolved config of a run on N nodes; nothing starts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from tools.launch.hostfile import HOSTFILE, SECRETS, RemoteStart, shown
from tools.launch.job import Job, keys_without_effect, model_dimensions
from tools.launch.nodes import RANK
from tools.launch.ray_node import ray_command, run_variables
from tools.launch.roles import NodeRole
from tools.launch.settings import variables
from tools.launch.stages import closing_stages, driver_stage, nodes_stage, stages
from verl.trainer.config.load import to_yaml
from verl.workers.config.engine import END_STAGES

TEMP_DIR = "/tmp/rl_<random>"


def print_plan(
    job: Job,
    role: NodeRole,
    problems: list[str],
    console: Console,
    others: Sequence[RemoteStart] = (),
    choice: Sequence[str] = (),
) -> None:
    """Print the plan of the whole run, as seen from any of its nodes.

    ``others`` are those that this one starts, ``choice`` is how the layout was chosen.
    """
    master = job.settings.master_addr or role.master_addr
    nodes = [role]
    if job.nnodes > 1:
        addresses = [start.host.address for start in others] or [f"<address of node {i}>" for i in range(1, job.nnodes)]
        nodes = [NodeRole(True, master, master, "<interface of MASTER_ADDR>")]
        for rank, address in enumerate(addresses, start=1):
            nodes.append(NodeRole(False, address, master, f"<interface of node {rank}>"))
    console.rule(f"Plan: {job.settings.config_name} on {job.nnodes} x {job.npus_per_node} {job.device} devices")
    _print_layout(job, console)
    console.print("".join(f"{line}\n" for line in choice), end="")
    for rank, node in enumerate(nodes):
        console.rule(f"Node {rank}: {'head' if node.is_head else 'worker'} {node.own_addr}")
        _print_environment(job, node, console, rank)
        console.print("\ncommands, in order:")
        console.print("".join(f"  {line}\n" for line in _commands(job, node, rank)), end="")
    if others:
        console.rule("Started from here")
        for start in others:
            console.print(shown(start, os.environ))
    console.rule("Resolved config")
    console.print(to_yaml(job.config))
    if block := keys_without_effect(job):
        console.print(block)
    if problems:
        console.rule("What this machine would refuse")
        for problem in problems:
            console.print(f"- {problem}")
    console.print("Nothing was started.")


def _print_layout(job: Job, console: Console) -> None:
    models, data, world = job.config.actor_rollout_ref, job.config.data, job.config.trainer.world_size
    engine, rollout = models.actor.megatron, models.rollout
    layout = engine.layout(world)
    sizes = {"TP": layout.tensor_model_parallel_size, "PP": layout.pipeline_model_parallel_size}
    sizes |= {"DP": layout.data_parallel_size, "EP": engine.expert_parallel}
    further = {"VPP": layout.virtual_pipeline_model_parallel_size, "CP": layout.context_parallel_size}
    further |= {"ETP": layout.expert_tensor_parallel_size}
    sizes |= {axis: size for axis, size in further.items() if size > 1}
    layers = _stage_layers(job)
    console.print(f"training: {' '.join(f'{axis}{n}' for axis, n in sizes.items())}, layers per stage {layers}")
    world = job.config.rollout_world_size
    over = rollout.experts_over(world)
    expert = f" EP{over}" if rollout.enable_expert_parallel else ""
    engines = f"{world // over} engines of " if over < world else ""
    replicas = rollout.replicas_per_engine(world)
    own = f", {job.config.trainer.schedule} on {world} ranks of its own" if job.config.has_rollout_ranks else ""
    console.print(f"rollout:  {engines}TP{rollout.tensor_model_parallel_size} DP{replicas}{expert}{own}")
    generated = job.config.gen_batch_size
    more = f" of {generated} at a time" if generated != data.train_batch_size else ""
    console.print(
        f"a step:   {data.train_batch_size} prompts{more} x {rollout.n} samples, prompts up to "
        f"{data.max_prompt_length} and responses up to {data.max_response_length} tokens"
    )


def _stage_layers(job: Job) -> str:
    """The number of layers of every stage where it is known: a plan can be printed without the model."""
    engine, settings = job.config.actor_rollout_ref.actor.megatron, job.settings
    with suppress(ValueError):  # the checks say that they do not divide
        counts = engine.layer_counts()
        if counts is None and settings.model_path is not None:
            counts = engine.layer_counts(model_dimensions(settings).get("num_hidden_layers"))
        if counts is not None:
            return ",".join(map(str, counts))
    sizes = zip(map(engine.override_transformer_config.get, END_STAGES), ("first", "last"), strict=True)
    ends = [f"{size} in the {name}" for size, name in sizes if size is not None]
    return ", ".join([*ends, "the others even"]) if ends else "even"


def _print_environment(job: Job, node: NodeRole, console: Console, rank: int) -> None:
    settings = job.settings
    console.print("started as:")
    given = {"NNODES": str(job.nnodes), "MASTER_ADDR": node.master_addr, "NODE_RANK": str(rank)}
    given |= {"CONFIG_NAME": settings.config_name, "OUTPUT_DIR": str(settings.output_dir)}
    names = [name for name in variables(settings.recipe) if name not in (*given, *SECRETS, HOSTFILE)]
    given |= {name: os.environ[name] for name in names if os.environ.get(name)} | dict(settings.own)
    prefix = " ".join(f"{name}={shlex.quote(value)}" for name, value in given.items())
    overrides = "".join(f" {shlex.quote(text)}" for text in settings.overrides)
    console.print(f"  {prefix} {settings.recipe.start_command}{overrides}")
    console.print("\nenvironment of Ray and the workers:")
    exported = run_variables(job, node) | {"RAY_AUTH_TOKEN": "<the run's token>"}
    for name in sorted(exported):
        console.print(f"  {name}={exported[name]}")


def _commands(job: Job, node: NodeRole, rank: int) -> list[str]:
    """The node's commands as shell lines; a stage that is skipped gives the reason."""
    labels = {"<facts of this node>": "<values>", RANK: str(rank)} if job.nnodes > 1 else {}
    ray = shlex.join(ray_command(job, node, TEMP_DIR, labels))
    if not node.is_head:
        return [ray, "# runs until the head says that the run has ended, or is lost"]
    count = str(job.nnodes)
    together = [nodes_stage(name, "--num-nodes", count) for name in ("join", "watch")] if job.nnodes > 1 else []
    return [ray, *(stage.shown() for stage in (*together, *stages(job), driver_stage(job), *closing_stages(job)))]
