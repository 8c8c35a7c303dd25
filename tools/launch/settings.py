"""The settings of a run: environment variables and Hydra overrides, read once into one frozen object."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from recipes.common.recipe import ROOT, Recipe, RecipeInputs
from tools.download import PACKAGES
from tools.launch.accelerators import CPU

RAY_PORT_OF_NODES = 6766  # where no RAY_PORT is named


def _path(text: str) -> Path:
    """The whole path; ValueError for one that no record, log or terminal shows as it is, or that has no such ~user."""
    path = Path(os.path.expanduser(text)).absolute()
    if (text.startswith("~") and path == Path(text).absolute()) or any(map(_is_hidden, str(path))):
        raise ValueError(text)
    return path


def _is_hidden(letter: str) -> bool:
    return unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp")  # Cs: a byte that is not UTF-8


class Kind(NamedTuple):
    """How a variable's text becomes a value, the least and the most of a number, what an error says is expected."""

    parse: Callable[[str], Any]
    expected: str
    least: float | None = None
    most: float = sys.maxsize


TEXT = Kind(str, "a text")
PATH = Kind(_path, "a path in UTF-8 without control characters, and a home that exists after ~")
COUNT = Kind(int, "a whole number of at least 1", 1)
SEED = Kind(int, "a whole number of at least 0", 0)
RANK = Kind(int, "a whole number from 0 to NNODES - 1", 0)
PORT = Kind(int, "a port number, 1024 to 65535", 1024, 65535)
SECONDS = Kind(float, "a number of seconds above 0", 1e-9, sys.float_info.max)


def _variable(kind: Kind, meaning: str, default: Any = None, shown: str | None = None) -> Any:
    """A field that the environment variable of its name in capitals gives; ``shown``: the default as users read it."""
    text = f"{default:g}" if isinstance(default, float) else str(default)
    return field(default=default, metadata={"kind": kind, "meaning": meaning, "shown": shown or text})


_HUBS = "hub that has a MODEL_PATH such as Qwen/Qwen3-0.6B: huggingface or modelscope"
# Read by the scripts before Python starts, HOSTFILE by hostfile.py: default as shown, meaning.
_BEFORE_SETTINGS = {
    "HOSTFILE": ("none", "file with a line per node, address and slots=8: started on one, it starts the others by ssh"),
    "STACK": ("cann92", "versions to install: cann92, or cann82 for CANN 8.2.RC1 (docs/installation.md)"),
    "VENV_DIR": (".venv in the repository", "virtual environment, made when it is not there"),
    "SETUP": ("yes", "no takes VENV_DIR as it is and installs nothing, for example in a container image"),
}
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
    model_source: str = "huggingface"
    own: Mapping[str, str] = field(default_factory=dict)  # the recipe's own variables, those that are given
    model_path: Path | None = _variable(  # noqa: RUF009 - a field
        PATH,
        "HF directory (FP8 as published, BF16); no weights if none are read",
        shown="a tiny model made on the spot",
    )
    dist_ckpt_path: Path | None = _variable(  # noqa: RUF009
        PATH, "sharded weights, on a shared disk; used as they are if there", shown="OUTPUT_DIR/dist_ckpt"
    )
    seed: int = _variable(SEED, "seed of data split, base model, sampling and training", 42)
    steps: int | None = _variable(COUNT, "number of training steps", shown="the config's")
    nnodes: int | None = _variable(COUNT, "number of nodes, those of rollout.nnodes among them", shown="the config's")
    npus_per_node: int | None = _variable(
        COUNT, "devices per node that trains; without NPUs the number of worker processes", shown="the config's"
    )
    master_addr: str | None = _variable(
        TEXT, "address of the head node, the same on every node", shown="this machine, for one node"
    )
    node_rank: int | None = _variable(
        RANK, "0 is the head; given everywhere, it names missing nodes", shown="by MASTER_ADDR: its owner is the head"
    )
    socket_ifname: str | None = _variable(
        TEXT, "network interface of this node", shown="the interface that reaches MASTER_ADDR"
    )
    ray_port: int | None = _variable(
        PORT, "port of Ray on the head", shown=f"{RAY_PORT_OF_NODES}; a free one on one node"
    )
    master_port: int | None = _variable(
        PORT, "port of torch.distributed's store on the head", shown="chosen when needed"
    )
    join_timeout_s: float = _variable(SECONDS, "how long the head waits for every node", 300.0)
    head_timeout_s: float = _variable(SECONDS, "how long a node waits for the head", 300.0)
    lost_timeout_s: float = _variable(SECONDS, "a node that is silent for so long has gone away", 20.0)
    plan_device: str | None = _variable(
        TEXT, "planned for first: a name of tools/plan/devices, or a file", shown="the device of this node"
    )
    ray_auth_token: str | None = _variable(
        TEXT, "Ray's token; set the same one on all nodes if they share no disk", shown="a file in OUTPUT_DIR"
    )

    @property
    def chooses_layout(self) -> bool:
        """Whether the planner chooses the layout: for any model, in the recipe's own configs."""
        recipe = self.recipe
        takes_any = self.model_path is not None and recipe.cpu_config is not None
        return takes_any and self.config_name in (recipe.full_config, recipe.cpu_config, recipe.small_config)

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
        return RecipeInputs(self.data_dir, self.seed, self.input_path, self.eval_input, self.model_path, own=self.own)

    @property
    def dist_ckpt_dir(self) -> Path:
        """The folder of the sharded weights, which a stage makes when they are not there."""
        return self.dist_ckpt_path or self.output_dir / "dist_ckpt"


class SettingsError(ValueError):
    """Variables or overrides cannot be used; ``settings`` has the defaults in their place, for other checks."""

    def __init__(self, problems: Sequence[str], settings: Settings) -> None:
        super().__init__("\n".join(problems))
        self.problems, self.settings = list(problems), settings


_VARIABLES = {one.name.upper(): one.metadata for one in fields(Settings) if one.metadata}


def variables(recipe: Recipe) -> dict[str, tuple[str, str]]:
    """Default and meaning of every variable: the one list behind --help, --print-plan and the README's table."""
    eval_meaning = "evaluation sets of the same form: name path, and again for each"
    return {
        "CONFIG_NAME": (_default_config(recipe), f"config in recipes/{recipe.name}/config, without .yaml"),
        recipe.input_variable: (recipe.input_default, recipe.input_meaning),
        **({recipe.eval_variable: (recipe.eval_default, eval_meaning)} if recipe.eval_variable else {}),
        **recipe.own_variables,
        **({"MODEL_SOURCE": ("huggingface", _HUBS)} if recipe.cpu_config else {}),
        "OUTPUT_DIR": (f"outputs/{recipe.name}", "everything the run writes, on a disk that all nodes share"),
        **{name: (one["shown"], one["meaning"]) for name, one in _VARIABLES.items()},
        **_BEFORE_SETTINGS,
    }


def _default_config(recipe: Recipe) -> str:
    names = {"npu": "NPUs", "cuda": "GPUs"}
    devices = " or ".join(names[device] for device in recipe.accelerators)
    if recipe.cpu_config is None:
        return f"{recipe.tiny_config}; with {devices} {recipe.full_config}"
    small = f" or, for a small model, {recipe.small_config}" if recipe.small_config else ""
    return f"{recipe.tiny_config}; with MODEL_PATH {recipe.cpu_config}{small}, on {devices} {recipe.full_config}"


def read_settings(
    recipe: Recipe,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    accelerator: str = CPU,
    num_accelerators: int = 0,
) -> Settings:
    """The settings in ``environment``; SettingsError that lists every value that is not what it should be."""
    problems: list[str] = []

    def read(name: str, kind: Kind) -> Any:
        text = environment.get(name, "").strip()
        with suppress(ValueError):
            value = kind.parse(text) if text else None
            if value is None or kind.least is None or kind.least <= value <= kind.most:
                return value
        problems.append(f"{name}={text!r}: expected {kind.expected}")
        return None

    hub = environment.get("MODEL_SOURCE", "").strip() or "huggingface"
    if recipe.cpu_config is not None and hub not in PACKAGES:
        problems.append(f"MODEL_SOURCE is {hub!r}; expected {' or '.join(sorted(PACKAGES))}")
        hub = "huggingface"
    given = {name.lower(): read(name, one["kind"]) for name, one in _VARIABLES.items()}
    given = {name: value for name, value in given.items() if value is not None}
    settings = Settings(
        recipe=recipe,
        config_name=environment.get("CONFIG_NAME") or recipe.default_config(accelerator, "model_path" in given),
        output_dir=read("OUTPUT_DIR", PATH) or ROOT / "outputs" / recipe.name,
        overrides=tuple(overrides),
        input_path=read(recipe.input_variable, PATH),
        eval_input=environment.get(recipe.eval_variable, "").strip() if recipe.eval_variable else "",
        accelerator=accelerator,
        num_accelerators=num_accelerators,
        model_source=hub,
        own={name: text for name in recipe.own_variables if (text := environment.get(name, "").strip())},
        **given,
    )
    problems += recipe.eval_problems(settings.eval_input)
    if wrong_own := recipe.own_problems(settings.recipe_inputs):
        problems, settings = [*problems, *wrong_own], replace(settings, own={})
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
