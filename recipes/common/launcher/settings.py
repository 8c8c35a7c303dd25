"""The settings of a run: environment variables and Hydra overrides, read once into one frozen object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from recipes.common.launcher import network
from recipes.common.recipe import ROOT, Recipe
from verl.utils.net_utils import LOOPBACK

CPU = "cpu"


def _number(kind: type[int] | type[float], least: float, most: float = float("inf")) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most or value == float("inf"):
            raise ValueError(text)
        return value

    return parse


@dataclass(frozen=True)
class Kind:
    """How a variable's text becomes a value, and what an error says was expected."""

    parse: Callable[[str], Any]
    expected: str


TEXT = Kind(str, "a text")
PATH = Kind(lambda text: Path(text).expanduser().absolute(), "a path")
COUNT = Kind(_number(int, 1), "a whole number of at least 1")
SEED = Kind(_number(int, 0), "a whole number of at least 0")
RANK = Kind(_number(int, 0), "a whole number from 0 to NNODES - 1")
PORT = Kind(_number(int, 1024, 65535), "a port number, 1024 to 65535")
SECONDS = Kind(_number(float, 1e-9), "a number of seconds above 0")

# name -> (default as shown to the user, meaning, kind), for every recipe; ``variables`` adds what a recipe decides.
COMMON_VARIABLES: dict[str, tuple[str, str, Kind]] = {
    "MODEL_PATH": ("a tiny model made on the spot", "HF directory (FP8 as published, or BF16) to start from", PATH),
    "DIST_CKPT_PATH": ("OUTPUT_DIR/dist_ckpt", "sharded weights, on a shared disk; used as they are if there", PATH),
    "SEED": ("42", "seed of data split, base model, sampling and training", SEED),
    "STEPS": ("the config's", "number of training steps", COUNT),
    "HOSTFILE": (
        "none",
        "file with a line per node, address and slots=8: started on one, it starts the others by ssh", TEXT,
    ),
    "NNODES": ("the config's", "number of nodes, those of rollout.nnodes among them", COUNT),
    "NPUS_PER_NODE": (
        "the config's",
        "devices per node that trains; without NPUs the number of worker processes", COUNT,
    ),
    "MASTER_ADDR": ("this machine, for one node", "address of the head node, the same on every node", TEXT),
    "NODE_RANK": (
        "by MASTER_ADDR: its owner is the head",
        "0 is the head; given everywhere, it names missing nodes", RANK,
    ),
    "SOCKET_IFNAME": ("the interface that reaches MASTER_ADDR", "network interface of this node", TEXT),
    "RAY_PORT": ("6766", "port of Ray on the head", PORT),
    "MASTER_PORT": ("chosen when needed", "port of torch.distributed's store on the head", PORT),
    "JOIN_TIMEOUT_S": ("300", "how long the head waits for every node", SECONDS),
    "HEAD_TIMEOUT_S": ("300", "how long a node waits for the head", SECONDS),
    "LOST_TIMEOUT_S": ("20", "a node that is silent for so long has gone away", SECONDS),
    "VENV_DIR": (".venv in the repository", "virtual environment, made when it is not there", TEXT),
    "SETUP": ("yes", "no takes VENV_DIR as it is and installs nothing, for example in a container image", TEXT),
    "PLAN_DEVICE": ("the device of this node", "planned for first: a name of tools/plan/devices, or a file", TEXT),
    "RAY_AUTH_TOKEN": (
        "a file in OUTPUT_DIR",
        "Ray's token; set the same one on all nodes if they share no disk", TEXT,
    ),
}  # fmt: skip
REMOVED = {"CONTROL_PORT": "nodes meet at RAY_PORT, the port of Ray on the head"}


def variables(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Default and meaning of every variable: the one list behind --help, --print-plan and the README's table."""
    names = {"npu": "NPUs", "cuda": "GPUs"}
    devices = " or ".join(names[device] for device in recipe.accelerators)
    meaning = "evaluation sets of the same form: name path, and again for each"
    return {
        "CONFIG_NAME": (
            f"{recipe.tiny_config}; with {devices} {recipe.full_config}",
            f"config in recipes/{recipe.name}/config, without .yaml",
        ),
        recipe.input_variable: (recipe.input_default, recipe.input_meaning),
        **({recipe.eval_variable: (recipe.eval_default, meaning)} if recipe.eval_variable else {}),
        "OUTPUT_DIR": (f"outputs/{recipe.name}", "everything the run writes, on a disk that all nodes share"),
        **{name: (default, meaning) for name, (default, meaning, _) in COMMON_VARIABLES.items()},
    }


@dataclass(frozen=True)
class Settings:
    """One node's view of the run. A field has the name of its variable; None means that it was not given."""

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
    master_port: int | None = None
    join_timeout_s: float = 300.0
    head_timeout_s: float = 300.0
    lost_timeout_s: float = 20.0
    accelerator: str = CPU

    @property
    def log_dir(self) -> Path:
        """The folder that has a folder of logs for every attempt."""
        return self.output_dir / "logs"

    @property
    def data_dir(self) -> Path:
        """The folder of the parquet files."""
        return self.output_dir / "data"

    @property
    def dist_ckpt_dir(self) -> Path:
        """The folder of the sharded weights, which a stage makes when they are not there."""
        return self.dist_ckpt_path or self.output_dir / "dist_ckpt"


def read_settings(
    recipe: Recipe, overrides: Sequence[str], environment: Mapping[str, str], accelerator: str = CPU
) -> Settings:
    """The settings in ``environment``; ValueError that lists every value that is not what it should be."""
    problems: list[str] = []

    def read(name: str, kind: Kind) -> Any:
        text = environment.get(name, "").strip()
        try:
            return kind.parse(text) if text else None
        except ValueError:
            problems.append(f"{name}={text!r}: expected {kind.expected}")
            return None

    names = {field.name for field in fields(Settings)}
    given = {name.lower(): read(name, kind) for name, (_, _, kind) in COMMON_VARIABLES.items() if name.lower() in names}
    own_config = recipe.full_config if accelerator in recipe.accelerators else recipe.tiny_config
    settings = Settings(
        recipe=recipe,
        config_name=environment.get("CONFIG_NAME") or own_config,
        output_dir=read("OUTPUT_DIR", PATH) or ROOT / "outputs" / recipe.name,
        overrides=tuple(overrides),
        input_path=read(recipe.input_variable, PATH),
        eval_input=environment.get(recipe.eval_variable, "").strip() if recipe.eval_variable else "",
        accelerator=accelerator,
        **{name: value for name, value in given.items() if value is not None},
    )
    problems += recipe.eval_problems(settings.eval_input)
    problems += [f"{name} is not used any more: {reason}" for name, reason in REMOVED.items() if environment.get(name)]
    problems += [
        f"{text!r} is neither an option nor an override: expected key=value, for example trainer.save_freq=10"
        for text in overrides
        if "=" not in text and not text.startswith("~")
    ]
    if problems:
        raise ValueError("\n".join(problems))
    return settings


@dataclass(frozen=True)
class NodeRole:
    """What this node is in the run: head or not, and the addresses and the interface that it uses."""

    is_head: bool
    own_addr: str
    master_addr: str
    interface: str


def find_role(settings: Settings, nnodes: int) -> NodeRole:
    """Head or not, and on which address; ValueError when the settings do not say. One node uses loopback alone."""
    addresses = network.own_addresses()
    master = None if settings.master_addr is None else network.resolve(settings.master_addr)
    if master is None and nnodes > 1:
        raise ValueError(
            f"the run has {nnodes} nodes (NNODES), but MASTER_ADDR is not set: set it to the head's address on "
            "every node, or NNODES=1 where this machine does everything"
        )
    is_head = master is None or master in addresses
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
    if settings.socket_ifname is not None or not is_head:
        own = network.address_towards(master, settings.socket_ifname)
    else:
        own = LOOPBACK if nnodes == 1 or master is None else master
    return NodeRole(is_head, own, own if nnodes == 1 or master is None else master, addresses.get(own, "lo"))


def find_accelerator() -> str:
    """npu where this machine has Ascend device files, cuda where torch can use a GPU, else cpu."""
    names = os.listdir("/dev")
    if any(name.startswith("davinci") and name[7:].isdigit() for name in names):
        return "npu"
    if any(name.startswith("nvidia") and name[6:].isdigit() for name in names):
        import torch  # takes seconds to import: only where there may be a GPU

        return "cuda" if torch.cuda.is_available() else CPU
    return CPU
