"""`@register`: how the arguments of a group call reach the ranks and how their outputs come back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, TypeVar

from verl.protocol import BY_RANK, DataProto

if TYPE_CHECKING:
    from verl.single_controller.base.worker import Worker
    from verl.single_controller.base.worker_group import WorkerGroup

MAGIC_ATTR = "_verl_registration"
EVERY_RANK = "every rank"  # the mesh of a group in which each rank takes a part of its own

Method = TypeVar("Method", bound=Callable[..., Any])
RankCall = tuple[tuple, dict[str, Any]]


class Dispatch(Enum):
    """Named ways to spread a call over the ranks."""

    ONE_TO_ALL = auto()  # every rank gets the same arguments; a list of outputs comes back
    ALL_TO_ALL = auto()  # every argument is a list with one entry per rank; a list of outputs comes back
    DP_COMPUTE = auto()  # as ALL_TO_ALL (upstream's name where every rank is one data-parallel replica)
    DP_COMPUTE_PROTO = auto()  # every rank gets one equal part of each DataProto; outputs are concatenated


class Execute(Enum):
    """Which ranks run the call."""

    ALL = auto()
    RANK_ZERO = auto()


def _keep_all(group: WorkerGroup) -> list[bool]:
    return [True] * group.world_size


@dataclass(frozen=True)
class DispatchFns:
    """One way to spread a call.

    Attributes:
        dispatch: (group, *args, **kwargs) -> one (args, kwargs) per rank.
        collect: (group, outputs per rank) -> the output of the call.
        kept: group -> whether the output of each rank is needed; the others are not sent and are None.
    """

    dispatch: Callable[..., list[RankCall]]
    collect: Callable[[WorkerGroup, list[Any]], Any]
    kept: Callable[[WorkerGroup], list[bool]] = _keep_all


@dataclass(frozen=True)
class Registration:
    """The registration of a method by ``@register``."""

    fns: DispatchFns
    is_rank_zero: bool
    blocking: bool


def register(
    dispatch_mode: Dispatch | DispatchFns = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
) -> Callable[[Method], Method]:
    """Makes a worker's method callable on its group; with ``blocking=False`` the call returns a ``PendingCall``."""
    fns = DISPATCH_MODE_FN_REGISTRY[dispatch_mode] if isinstance(dispatch_mode, Dispatch) else dispatch_mode
    registration = Registration(fns, execute_mode is Execute.RANK_ZERO, blocking)

    def mark(method: Method) -> Method:
        setattr(method, MAGIC_ATTR, registration)
        return method

    return mark


def registered_methods(worker_cls: type[Worker]) -> dict[str, Registration]:
    """The methods of ``worker_cls`` marked with ``@register``, inherited ones included."""
    methods = {name: getattr(worker_cls, name, None) for name in dir(worker_cls)}
    return {name: getattr(method, MAGIC_ATTR) for name, method in methods.items() if hasattr(method, MAGIC_ATTR)}


def dispatch_one_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[RankCall]:
    """The same arguments for every rank; a DataProto is stored once."""
    shared_args = tuple(_shared(group, value) for value in args)
    shared_kwargs = {key: _shared(group, value) for key, value in kwargs.items()}
    return [(shared_args, shared_kwargs)] * group.world_size


def dispatch_all_to_all(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[RankCall]:
    named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    for name, value in named.items():
        if not isinstance(value, list | tuple) or len(value) != group.world_size:
            raise ValueError(f"{name} must be a list of {group.world_size} entries, one per rank, got {value!r:.200}")
    ranks = range(group.world_size)
    return [(tuple(arg[r] for arg in args), {key: value[r] for key, value in kwargs.items()}) for r in ranks]


def collect_all_to_all(group: WorkerGroup, outputs: list[Any]) -> list[Any]:
    return outputs


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, *, all_ranks_report: bool = False) -> DispatchFns:
    """Splits over the data-parallel axis of a mesh that the workers registered under ``mesh_name``.

    With ``all_ranks_report`` the figures that each rank has in ``meta_info["by_rank"]`` are merged, also of the ranks
    whose rows are not collected; these must return a DataProto without rows.
    """

    def dispatch(group: WorkerGroup, *args: Any, **kwargs: Any) -> list[RankCall]:
        """Part ``dp_ranks[r]`` of every DataProto for rank r, each part stored once; other arguments as they are."""
        mesh = group.mesh(mesh_name)
        try:
            spread_args = [_parts(group, value, mesh.dp_size) for value in args]
            spread_kwargs = {key: _parts(group, value, mesh.dp_size) for key, value in kwargs.items()}
        except ValueError as error:
            raise ValueError(f"mesh {mesh_name!r} of group {group.name!r} (dp size {mesh.dp_size}): {error}") from error
        return [
            (tuple(parts[dp] for parts in spread_args), {key: parts[dp] for key, parts in spread_kwargs.items()})
            for dp in mesh.dp_ranks
        ]

    def collect(group: WorkerGroup, outputs: list[Any]) -> Any:
        """Outputs of the collecting ranks in dp order, concatenated when they are DataProtos."""
        mesh = group.mesh(mesh_name)
        order = sorted((dp, rank) for rank, dp in enumerate(mesh.dp_ranks) if mesh.is_collect[rank])
        collected = [outputs[rank] for _, rank in order]
        if not all(isinstance(part, DataProto) for part in collected):
            return collected
        output = DataProto.concat(collected)
        if all_ranks_report:
            reports = [DataProto(meta_info={BY_RANK: part.meta_info[BY_RANK]}) for part in outputs]
            output.meta_info |= DataProto.concat(reports).meta_info
        return output

    def kept(group: WorkerGroup) -> list[bool]:
        return _keep_all(group) if all_ranks_report else list(group.mesh(mesh_name).is_collect)

    return DispatchFns(dispatch, collect, kept)


def _shared(group: WorkerGroup, value: Any) -> Any:
    return group.put(value) if isinstance(value, DataProto) else value


def _parts(group: WorkerGroup, value: Any, dp_size: int) -> list[Any]:
    if not isinstance(value, DataProto):
        return [value] * dp_size
    return [group.put(part) for part in value.chunk(dp_size)]


_ALL_TO_ALL = DispatchFns(dispatch_all_to_all, collect_all_to_all)
DISPATCH_MODE_FN_REGISTRY: dict[Dispatch, DispatchFns] = {
    Dispatch.ONE_TO_ALL: DispatchFns(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: _ALL_TO_ALL,
    Dispatch.DP_COMPUTE: _ALL_TO_ALL,
    Dispatch.DP_COMPUTE_PROTO: make_nd_compute_dataproto_dispatch_fn(EVERY_RANK),
}
