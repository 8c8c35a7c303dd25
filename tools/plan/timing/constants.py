"""The constants of the cost model, from ``constants.toml``: what each is, its value, and where it comes from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path

TABLE = Path(__file__).with_name("constants.toml")
ALL = "all"  # the family of a constant that every device shares


@dataclass(frozen=True)
class Rates:
    """Every constant that one device family needs."""

    train_efficiency: float  # share of peak that a training pass reaches, host and vector work included
    decode_efficiency: float  # share of peak that the matrix products of a decode step reach
    memory_efficiency: float  # share of the rate of device memory that decoding reaches
    link_efficiency: float  # share of a link's rate that a collective reaches
    host_link_efficiency: float  # share of the host link's rate that copies of weights and optimizer state reach
    expert_load_spread: float  # standard deviation of an expert's tokens over their mean, a layer and micro-batch
    layer_pass_s: float  # least seconds of one layer in one pass of a micro-batch: kernels that are launched one by one
    decode_layer_s: float  # seconds of a layer in a decode step without reading weights: kernels, collectives, waits
    eager_layer_s: float  # the same without captured graphs, when the host launches kernel after kernel
    decode_host_s: float  # seconds of a decode step outside the model: scheduling, inputs, sampling
    decode_host_s_per_sequence: float  # and of each running sequence
    host_sync_s: float  # one agreement of all replicas over their hosts; a step has two
    device_sync_s: float  # the same over their devices
    generation_fixed_s: float  # seconds of a generation outside its steps: freeing and allocating memory
    switch_fixed_s: float  # seconds between training and generation without copies: freeing and allocating memory
    tensor_sync_s: float  # seconds of gathering one tensor in a ``per_tensor`` weight sync
    gather_sync_gbs: float  # rate at which a ``per_tensor`` sync gathers the whole model to every rank
    packed_sync_gbs: float  # the same of a ``packed`` sync
    direct_sync_gbs: float  # rate at which a ``direct`` sync brings a rank its own weights
    dispatch_gbs: float  # rate at which a controller writes the rows of all ranks, one after another
    reward_s: float  # seconds of grading one response
    # Where there is no NPU, nothing is longer without its features.
    multistream_us: float = 0.0  # microseconds that a layer's decode step takes longer without several streams
    reduce_scatter_us: float = 0.0  # the same without reduce-scatter after attention
    kv_nz_us: float = 0.0  # the same without the NZ layout of the cache
    no_transpose_us: float = 0.0  # the same where a rank with one expert transposes its weights


@dataclass(frozen=True)
class Constant:
    """One constant of one family.

    value · origin: the published row or document it comes from · prior, spread: of a fitted one, what is expected
    without any row, and by which factor (as a natural logarithm) it may be off; spread 0 = not fitted.
    """

    name: str
    family: str
    value: float
    origin: str
    prior: float = 0.0
    spread: float = 0.0

    @property
    def key(self) -> str:
        """``family.name``."""
        return f"{self.family}.{self.name}"


@dataclass(frozen=True)
class PhaseError:
    """How far predictions of one phase were off on published rows that they had not seen.

    error: the largest, as a share of the published seconds · rows: how many there were; one says little.
    """

    error: float
    rows: int


@dataclass(frozen=True)
class Constants:
    """All of them by ``family.name``, and the leave-one-out errors by family and phase."""

    by_key: Mapping[str, Constant]
    errors: Mapping[str, Mapping[str, PhaseError]] = field(default_factory=dict)

    @property
    def fitted(self) -> list[Constant]:
        """Those that ``calibrate`` sets."""
        return [constant for constant in self.by_key.values() if constant.spread > 0]

    def rates(self, family: str) -> Rates:
        """The constants of ``family``: its own constants, and where it has none, those of all."""
        values = {}
        for known in fields(Rates):
            found = self.by_key.get(f"{family}.{known.name}") or self.by_key.get(f"{ALL}.{known.name}")
            if found is not None:
                values[known.name] = found.value
            elif known.default is MISSING:
                raise ValueError(f"{TABLE.name} has neither {family}.{known.name} nor {ALL}.{known.name}")
        return Rates(**values)

    def with_values(self, values: Mapping[str, float]) -> Constants:
        """The same with other values, by ``family.name``."""
        changed = {key: replace(self.by_key[key], value=value) for key, value in values.items()}
        return Constants({**self.by_key, **changed}, self.errors)


def load_constants(path: Path = TABLE) -> Constants:
    """The table; ValueError for a name that ``Rates`` does not have."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    errors = {
        family: {phase: PhaseError(**entry) for phase, entry in phases.items()}
        for family, phases in table.pop("errors", {}).items()
    }
    known = {known.name for known in fields(Rates)}
    found = {}
    for family, constants in table.items():
        for name, entry in constants.items():
            if name not in known:
                raise ValueError(f"{path.name}: {family}.{name} is no constant of the model; known: {', '.join(known)}")
            constant = Constant(name, family, **entry)
            found[constant.key] = constant
    return Constants(found, errors)
