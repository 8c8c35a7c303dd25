"""The settings of a run: environment variables and Hydra overrides, read once into one frozen object."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from recipes.common.recipe import ROOT, Recipe, RecipeInputs
from tools.download import PACKAGES
from tools.launch import network
from verl.utils.net_utils import LOOPBACK

CPU = "cpu"
RAY_PORT_OF_NODES = 6766  # where no RAY_PORT is named
DEV = Path("/dev")


def _path(text: str) -> Path:
    """The whole path; ValueError for one that no record, log or terminal shows as it is, or that has no such ~user."""
    path = Path(os.path.expanduser(text)).absolute()
    if (text.startswith("~") and path == Path(text).absolute()) or any(map(_is_hidden, str(path))):
        raise ValueError(text)
    return path


def _is_hidden(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")  # Cs: a byte that is not UTF-8


# kind of a variable -> how its text becomes a value, the least and the most of a number, what an error says is expected
KINDS: dict[str, tuple[Callable[[str], Any], float | None, float, str]] = {
    "text": (str, None, 0, "a text"),
    "path": (_path, None, 0, "a path in UTF-8 without control characters, and a home that exists after ~"),
    "count": (int, 1, sys.maxsize, "a whole number of at least 1"),
    "seed": (int, 0, sys.maxsize, "a whole number of at least 0"),
    "rank": (int, 0, sys.maxsize, "a whole number from 0 to NNODES - 1"),
    "port": (int, 1024, 65535, "a port number, 1024 to 65535"),
    "seconds": (float, 1e-9, sys.float_info.max, "a number of seconds above 0"),
}
# The variables of every recipe: name, kind, default as shown to the user, meaning. ``variables`` adds a recipe's own.
_TABLE = """
MODEL_PATH | path | a tiny model made on the spot | HF directory (FP8 as published, BF16); no weights if none are read
DIST_CKPT_PATH | path | OUTPUT_DIR/dist_ckpt | sharded weights, on a shared disk; used as they are if there
SEED | seed | 42 | seed of data split, base model, sampling and training
STEPS | count | the config's | number of training steps
HOSTFILE | text | none | file with a line per node, address and slots=8: started on one, it starts the others by ssh
NNODES | count | the config's | number of nodes, those of rollout.nnodes among them
NPUS_PER_NODE | count | the config's | devices per node that trains; without NPUs the number of worker processes
MASTER_ADDR | text | this machine, for one node | address of the head node, the same on every node
NODE_RANK | rank | by MASTER_ADDR: its owner is the head | 0 is the head; given everywhere, it names missing nodes
SOCKET_IFNAME | text | the interface that reaches MASTER_ADDR | network interface of this node
RAY_PORT | port | 6766; a free one on one node | port of Ray on the head
MASTER_PORT | port | chosen when needed | port of torch.distributed's store on the head
JOIN_TIMEOUT_S | seconds | 300 | how long the head waits for every node
HEAD_TIMEOUT_S | seconds | 300 | how long a node waits for the head
LOST_TIMEOUT_S | seconds | 20 | a node that is silent for so long has gone away
STACK | text | cann92 | versions to install: cann92, or cann82 for CANN 8.2.RC1 (docs/installation.md)
VENV_DIR | text | .venv in the repository | virtual environment, made when it is not there
SETUP | text | yes | no takes VENV_DIR as it is and installs nothing, for example in a container image
PLAN_DEVICE | text | the device of this node | planned for first: a name of tools/plan/devices, or a file
RAY_AUTH_TOKEN | text | a file in OUTPUT_DIR | Ray's token; set the same one on all nodes if they share no disk
"""
_HUBS = "hub that has a MODEL_PATH such as Qwen/Qwen3-0.6B: huggingface or modelscope"
_ROWS = [[cell.strip() for cell in line.split("|")] for line in _TABLE.strip().splitlines()]
REMOVED = {"CONTROL_PORT": "nodes meet at RAY_PORT, the port of Ray on the head"}


@dataclass(frozen=True)
class Settings:
    """One node's view of the run. A field has the name of its variable; None means that it was not given.

    ``chosen`` are overrides that the planner has chosen, which the user's own override.
    """

    recipe: Recipe
    config_name: str
    output_dir: Path
    overrides: tuple[str, ...] = ()
    input_path: Path | None = None
    eval_input: str = ""
    accelerator: str = CPU
    num_accelerators: int = 0
    chosen: tuple[str, ...] = ()
    model_path: Path | None = None
    model_source: str = "huggingface"
    dist_ckpt_path: Path | None = None
    seed: int = 42
    steps: int | None = None
    nnodes: int | None = None
    npus_per_node: int | None = None
    master_addr: str | None = None
    node_rank: int | None = None
    socket_ifname: str | None = None
    ray_port: int | None = None
    master_port: int | None = None
    join_timeout_s: float = 300.0
    head_timeout_s: float = 300.0
    lost_timeout_s: float = 20.0
    plan_device: str | None = None
    ray_auth_token: str | None = None

    @property
    def chooses_layout(self) -> bool:
        """Whether the planner chooses the layout: for any model, in the recipe's own configs."""
        recipe = self.recipe
        takes_any = self.model_path is not None and recipe.cpu_config is not None
        return takes_any and self.config_name in (recipe.full_config, recipe.cpu_config)

    @property
    def num_devices(self) -> int | None:
        """NPUS_PER_NODE, or where the layout is chosen all accelerators of this node; None: as the config says."""
        asked = [text.partition("=")[2] for text in self.overrides if text.startswith("trainer.device=")]
        is_here = asked[-1:] in ([], ["auto"], [self.accelerator])
        here = self.num_accelerators if self.chooses_layout and is_here else None
        return self.npus_per_node or here or None

    @property
    def log_dir(self) -> Path:
        """The folder that has a folder of logs for every attempt."""
        return self.output_dir / "logs"

    @property
    def data_dir(self) -> Path:
        return self.output_dir / "data"

    @property
    def recipe_inputs(self) -> RecipeInputs:
        """What the recipe's functions read of these settings."""
        return RecipeInputs(self.data_dir, self.seed, self.input_path, self.eval_input, self.model_path)

    @property
    def dist_ckpt_dir(self) -> Path:
        """The folder of the sharded weights, which a stage makes when they are not there."""
        return self.dist_ckpt_path or self.output_dir / "dist_ckpt"


class SettingsError(ValueError):
    """Variables or overrides cannot be used; ``settings`` has the defaults in their place, for other checks."""

    def __init__(self, problems: Sequence[str], settings: Settings) -> None:
        super().__init__("\n".join(problems))
        self.problems, self.settings = list(problems), settings


def variables(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Default and meaning of every variable: the one list behind --help, --print-plan and the README's table."""
    eval_meaning = "evaluation sets of the same form: name path, and again for each"
    return {
        "CONFIG_NAME": (
            _default_config(recipe),
            f"config in recipes/{recipe.name}/config, without .yaml",
        ),
        recipe.input_variable: (recipe.input_default, recipe.input_meaning),
        **({recipe.eval_variable: (recipe.eval_default, eval_meaning)} if recipe.eval_variable else {}),
        **({"MODEL_SOURCE": ("huggingface", _HUBS)} if recipe.cpu_config else {}),
        "OUTPUT_DIR": (f"outputs/{recipe.name}", "everything the run writes, on a disk that all nodes share"),
        **{name: (default, meaning) for name, _, default, meaning in _ROWS},
    }


def _default_config(recipe: Recipe) -> str:
    names = {"npu": "NPUs", "cuda": "GPUs"}
    devices = " or ".join(names[device] for device in recipe.accelerators)
    if recipe.cpu_config is None:
        return f"{recipe.tiny_config}; with {devices} {recipe.full_config}"
    return f"{recipe.tiny_config}; with MODEL_PATH {recipe.cpu_config}, on {devices} {recipe.full_config}"


def read_settings(
    recipe: Recipe,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    accelerator: str = CPU,
    num_accelerators: int = 0,
) -> Settings:
    """The settings in ``environment``; SettingsError that lists every value that is not what it should be."""
    problems: list[str] = []

    def read(name: str, kind: str) -> Any:
        text = environment.get(name, "").strip()
        parse, least, most, expected = KINDS[kind]
        with suppress(ValueError):
            value = parse(text) if text else None
            if value is None or least is None or least <= value <= most:
                return value
        problems.append(f"{name}={text!r}: expected {expected}")
        return None

    hub = environment.get("MODEL_SOURCE", "").strip() or "huggingface"
    if recipe.cpu_config is not None and hub not in PACKAGES:
        problems.append(f"MODEL_SOURCE is {hub!r}; expected {' or '.join(sorted(PACKAGES))}")
        hub = "huggingface"
    names = {field.name for field in fields(Settings)}
    given = {name.lower(): read(name, kind) for name, kind, *_ in _ROWS if name.lower() in names}
    given = {name: value for name, value in given.items() if value is not None}
    settings = Settings(
        recipe=recipe,
        config_name=environment.get("CONFIG_NAME") or recipe.default_config(accelerator, "model_path" in given),
        output_dir=read("OUTPUT_DIR", "path") or ROOT / "outputs" / recipe.name,
        overrides=tuple(overrides),
        input_path=read(recipe.input_variable, "path"),
        eval_input=environment.get(recipe.eval_variable, "").strip() if recipe.eval_variable else "",
        accelerator=accelerator,
        num_accelerators=num_accelerators,
        model_source=hub,
        **given,
    )
    problems += recipe.eval_problems(settings.eval_input)
    problems += [f"{name} is not used any more: {reason}" for name, reason in REMOVED.items() if environment.get(name)]
    wrong = [text for text in overrides if "=" not in text and not text.startswith("~")]
    problems += [
        f"{text!r} is neither an option nor an override: expected key=value, for example trainer.save_freq=10"
        for text in wrong
    ]
    if problems:
        raise SettingsError(
            problems, replace(settings, overrides=tuple(text for text in overrides if text not in wrong))
        )
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
    given = settings.master_addr or ""
    if nnodes > 1 and (given == "localhost" or network.is_loopback(given)):
        raise ValueError(
            f"MASTER_ADDR is {given} and the run has {nnodes} nodes: every node would take itself for the head; "
            "give the head's name or address in the network"
        )
    is_head = master is None or network.is_own(master, addresses)
    if settings.node_rank is not None and (settings.node_rank == 0) != is_head:
        raise ValueError(
            f"NODE_RANK is {settings.node_rank}, but MASTER_ADDR {master} is {'' if is_head else 'not '}one of this "
            f"node's addresses ({', '.join(addresses)}): rank 0 is the node that owns MASTER_ADDR"
        )
    if settings.node_rank is not None and settings.node_rank >= nnodes:
        raise ValueError(f"NODE_RANK is {settings.node_rank} with NNODES {nnodes}: expected 0 to {nnodes - 1}")
    if not is_head and nnodes == 1:
        raise ValueError(
            f"MASTER_ADDR {master} is not an address of this machine and NNODES is 1: unset it, or set NNODES"
        )
    own = LOOPBACK if nnodes == 1 or master is None else master
    if settings.socket_ifname is not None or not is_head:
        own = network.address_towards(master, settings.socket_ifname)
    elif nnodes > 1 and network.is_loopback(own):  # Debian's /etc/hosts gives a host's own name as 127.0.1.1
        own = network.address_towards(None, None)
    if nnodes > 1 and network.is_loopback(own):
        raise ValueError(
            f"MASTER_ADDR {given} means {own} here, where other nodes cannot reach this one, and no "
            "interface that is up has another IPv4 address: give this node a network, or NNODES=1"
        )
    seen = own if nnodes == 1 or master is None or network.is_loopback(master) else master
    return NodeRole(is_head, own, seen, addresses.get(own, "lo"))


def find_accelerator() -> str:
    """npu where this machine has Ascend device files, cuda where torch can use a GPU, else cpu."""
    if list(DEV.glob("davinci[0-9]*")):
        return "npu"
    if list(DEV.glob("nvidia[0-9]*")):
        import torch  # takes seconds to import: only where there may be a GPU

        return "cuda" if torch.cuda.is_available() else CPU
    return CPU


def count_accelerators(accelerator: str) -> int:
    """How many of these devices a process sees here; 0 on a CPU."""
    if accelerator == "npu":
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        return len(list(DEV.glob("davinci[0-9]*")) if visible is None else visible.replace(",", " ").split())
    if accelerator == "cuda":
        import torch

        return torch.cuda.device_count()
    return 0
