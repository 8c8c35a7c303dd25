"""What the user asked for: environment variables and Hydra overrides, read once into one frozen object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from recipes.common.launcher import network
from recipes.common.recipe import ROOT, Recipe

# name -> (default as shown to the user, meaning), of every recipe; ``variables`` adds what a recipe decides.
COMMON_VARIABLES: dict[str, tuple[str, str]] = {
    "MODEL_PATH": ("a tiny model made on the spot", "HF directory (FP8 as published, or BF16) to start from"),
    "DIST_CKPT_PATH": ("OUTPUT_DIR/dist_ckpt", "sharded weights, on a shared disk; used as they are if there"),
    "SEED": ("42", "seed of data split, base model, sampling and training"),
    "STEPS": ("the config's", "number of training steps"),
    "HOSTFILE": ("none", "file with a line per node, address and slots=8: started on one, it starts the others by ssh"),
    "NNODES": ("the config's", "number of nodes, those of rollout.nnodes among them"),
    "NPUS_PER_NODE": ("the config's", "devices per node that trains; without NPUs the number of worker processes"),
    "MASTER_ADDR": ("this machine, for one node", "address of the head node, the same on every node"),
    "NODE_RANK": ("by MASTER_ADDR: its owner is the head", "0 is the head; given everywhere, it names missing nodes"),
    "SOCKET_IFNAME": ("the interface that reaches MASTER_ADDR", "network interface of this node"),
    "RAY_PORT": ("6766", "port of Ray on the head"),
    "CONTROL_PORT": ("RAY_PORT + 1", "port on the head where the nodes' launchers meet"),
    "MASTER_PORT": ("chosen when needed", "port of torch.distributed's store on the head"),
    "JOIN_TIMEOUT_S": ("300", "how long the head waits for every node"),
    "HEAD_TIMEOUT_S": ("300", "how long a node waits for the head"),
    "LOST_TIMEOUT_S": ("20", "a node that is silent for so long has gone away"),
    "VENV_DIR": (".venv in the repository", "virtual environment, made when it is not there"),
    "SETUP": ("yes", "no takes VENV_DIR as it is and installs nothing, for example in a container image"),
    "PLAN_DEVICE": ("the device of this node", "planned for first: a name of tools/plan/devices, or a file"),
    "RAY_AUTH_TOKEN": ("a file in OUTPUT_DIR", "Ray's token; set the same one on all nodes if they share no disk"),
}  # fmt: skip

CPU = "cpu"
T = TypeVar("T")


def variables(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """The one list behind --help, --print-plan and the README's table of a recipe."""
    names = {"npu": "NPUs", "cuda": "GPUs"}
    devices = " or ".join(names[device] for device in recipe.accelerators)
    meaning = "evaluation sets of the same form: name path, and again for each"
    evaluation = {recipe.eval_variable: (recipe.eval_default, meaning)} if recipe.eval_variable else {}
    return {
        "CONFIG_NAME": (
            f"{recipe.tiny_config}; with {devices} {recipe.full_config}",
            f"config in recipes/{recipe.name}/config, without .yaml",
        ),
        recipe.input_variable: (recipe.input_default, recipe.input_meaning),
        **evaluation,
        "OUTPUT_DIR": (f"outputs/{recipe.name}", "everything the run writes, on a disk that all nodes share"),
        **COMMON_VARIABLES,
    }


@dataclass(frozen=True)
class Settings:
    """One node's view of the run; a field that is None was not given and has a default in ``variables``."""

    recipe: Recipe
    config_name: str
    output_dir: Path
    overrides: tuple[str, ...] = ()
    input_path: Path | None = None
    eval_input: str = ""
    model_path: Path | None = None
    dist_ckpt_path: Path | None = None
    seed: int = 42
    steps: int | None = None
    nnodes: int | None = None
    npus_per_node: int | None = None
    master_addr: str | None = None
    node_rank: int | None = None
    socket_ifname: str | None = None
    ray_port: int = 6766
    control_port: int = 6767
    master_port: int | None = None
    join_timeout_s: float = 300.0
    head_timeout_s: float = 300.0
    lost_timeout_s: float = 20.0
    accelerator: str = CPU

    @property
    def log_dir(self) -> Path:
        """Where every attempt has a folder for what its stages say."""
        return self.output_dir / "logs"

    @property
    def data_dir(self) -> Path:
        """Where the parquet files go."""
        return self.output_dir / "data"

    @property
    def dist_ckpt_dir(self) -> Path:
        """Where the sharded weights are, or will be."""
        return self.dist_ckpt_path or self.output_dir / "dist_ckpt"


def read_settings(
    recipe: Recipe, overrides: Sequence[str], environment: Mapping[str, str], accelerator: str = CPU
) -> Settings:
    """The settings in ``environment``; ValueError that lists every value that is not what it should be."""
    problems: list[str] = []

    def read(name: str, kind: Callable[[str], T], expected: str) -> T | None:
        text = environment.get(name, "").strip()
        if not text:
            return None
        try:
            return kind(text)
        except ValueError:
            problems.append(f"{name}={text!r}: expected {expected}")
            return None

    def count(name: str) -> int | None:
        return read(name, _at_least(1), "a whole number of at least 1")

    def port(name: str) -> int | None:
        return read(name, _port, "a port number, 1024 to 65535")

    def seconds(name: str) -> float | None:
        return read(name, _positive, "a number of seconds above 0")

    def path(name: str) -> Path | None:
        return read(name, lambda text: Path(text).expanduser().absolute(), "a path")

    ray_port = port("RAY_PORT") or 6766
    seed = read("SEED", _at_least(0), "a whole number of at least 0")
    own_config = recipe.full_config if accelerator in recipe.accelerators else recipe.tiny_config
    settings = Settings(
        recipe=recipe,
        config_name=environment.get("CONFIG_NAME") or own_config,
        output_dir=path("OUTPUT_DIR") or ROOT / "outputs" / recipe.name,
        overrides=tuple(overrides),
        input_path=path(recipe.input_variable),
        eval_input=environment.get(recipe.eval_variable, "").strip() if recipe.eval_variable else "",
        model_path=path("MODEL_PATH"),
        dist_ckpt_path=path("DIST_CKPT_PATH"),
        seed=42 if seed is None else seed,
        steps=count("STEPS"),
        nnodes=count("NNODES"),
        npus_per_node=count("NPUS_PER_NODE"),
        master_addr=environment.get("MASTER_ADDR") or None,
        node_rank=read("NODE_RANK", _at_least(0), "a whole number from 0 to NNODES - 1"),
        socket_ifname=environment.get("SOCKET_IFNAME") or None,
        ray_port=ray_port,
        control_port=port("CONTROL_PORT") or ray_port + 1,
        master_port=port("MASTER_PORT"),
        join_timeout_s=seconds("JOIN_TIMEOUT_S") or 300.0,
        head_timeout_s=seconds("HEAD_TIMEOUT_S") or 300.0,
        lost_timeout_s=seconds("LOST_TIMEOUT_S") or 20.0,
        accelerator=accelerator,
    )
    problems += recipe.eval_problems(settings.eval_input)
    problems += [
        f"{text!r} is no option and no override: expected key=value, for example trainer.save_freq=10"
        for text in overrides
        if "=" not in text and not text.startswith("~")
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return settings


@dataclass(frozen=True)
class Place:
    """Where this node stands in the run."""

    is_head: bool
    own_addr: str
    master_addr: str
    interface: str


def find_place(settings: Settings, nnodes: int) -> Place:
    """Head or worker, and on which address; ValueError when the settings do not say."""
    addresses = network.own_addresses()
    if settings.master_addr is None:
        if nnodes > 1:
            raise ValueError(
                f"the run has {nnodes} nodes (NNODES), but MASTER_ADDR is not set: set it to the head's address on "
                "every node, or NNODES=1 where this machine does everything"
            )
        own = network.address_towards(None, settings.socket_ifname)
        return Place(True, own, own, addresses.get(own, "lo"))
    master = network.resolve(settings.master_addr)
    is_head = master in addresses
    if settings.node_rank is not None and (settings.node_rank == 0) != is_head:
        here = ", ".join(addresses)
        raise ValueError(
            f"NODE_RANK is {settings.node_rank}, but MASTER_ADDR {master} is {'' if is_head else 'not '}one of this "
            f"node's addresses ({here}): rank 0 is the node that owns MASTER_ADDR"
        )
    if settings.node_rank is not None and settings.node_rank >= nnodes:
        raise ValueError(f"NODE_RANK is {settings.node_rank} with NNODES {nnodes}: expected 0 to {nnodes - 1}")
    if not is_head and nnodes == 1:
        raise ValueError(
            f"MASTER_ADDR {master} is not an address of this machine and NNODES is 1: unset it, or set NNODES"
        )
    own = master if is_head and not settings.socket_ifname else network.address_towards(master, settings.socket_ifname)
    return Place(is_head, own, master, addresses.get(own, "lo"))


def find_accelerator() -> str:
    """npu where this machine has Ascend device files, cuda where torch can use a GPU, else cpu."""
    names = os.listdir("/dev")
    if any(name.startswith("davinci") and name[7:].isdigit() for name in names):
        return "npu"
    if any(name.startswith("nvidia") and name[6:].isdigit() for name in names):
        import torch  # seconds to import: only where there may be something to find

        return "cuda" if torch.cuda.is_available() else CPU
    return CPU


def _at_least(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(text)
        return value

    return parse


def _port(text: str) -> int:
    value = int(text)
    if not 1024 <= value <= 65535:
        raise ValueError(text)
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value
