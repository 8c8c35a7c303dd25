"""`@register`: how the arguments of a group call reach the ranks and how their outputs come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol, TypeVar

from verl.protocol import BY_RANK, DataProto, pad_dataproto_to_divisor
from verl.single_controller.base.mesh import Mesh
from verl.utils.errors import BatchError

_REGISTRATION = "_registration"  # attribute of a method that a group may call

Method = TypeVar("Method", bound=Callable[..., Any])
RankCall = tuple[tuple, dict[str, Any]]


class Group(Protocol):
    """What dispatching asks of a group of workers."""

    name: str

    @property
    def world_size(self) -> int: ...

    def put(self, value: DataProto) -> Any: ...

    def mesh(self, mesh_name: str) -> Mesh: ...


class Dispatch(Enum):
    """Named ways to spread a call over the ranks."""

    ONE_TO_ALL = "every rank gets the same arguments; a list of outputs comes back"
    ALL_TO_ALL = "the same, but lists with one entry per rank are spread when all arguments are such lists"
    DP_COMPUTE_PROTO = "every rank gets one equal part of each DataProto; outputs are concatenated"


class Execute(Enum):
    """Which ranks run the call."""

    ALL = "all"
    RANK_ZERO = "rank 0"


def _keep_all(group: Group) -> list[bool]:
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
    collect: Callable[[Group, list[Any]], Any]
    kept: Callable[[Group], list[bool]] = _keep_all


@dataclass(frozen=True)
class Registration:
    """The registration of a method by ``@register``."""

    fns: DispatchFns
    is_rank_zero: bool


def register(
    dispatch_mode: Dispatch | DispatchFns = Dispatch.ALL_TO_ALL, execute_mode: Execute = Execute.ALL
) -> Callable[[Method], Method]:
    """Makes a worker's method callable on its group."""
    fns = dispatch_mode if isinstance(dispatch_mode, DispatchFns) else _MODES.get(dispatch_mode)
    if fns is None or not isinstance(execute_mode, Execute):
        modes = [str(mode) for mode in (*Dispatch, *Execute)]
        raise BatchError(f"a method is registered as {dispatch_mode!r}, {execute_mode!r}; expected one of {modes}")
    is_rank_zero = execute_mode is Execute.RANK_ZERO
    if is_rank_zero and dispatch_mode is Dispatch.ALL_TO_ALL:
        fns = _MODES[Dispatch.ONE_TO_ALL]  # a list is no list of ranks' values
    registration = Registration(fns, is_rank_zero)

    def mark(method: Method) -> Method:
        setattr(method, _REGISTRATION, registration)
        return method

    return mark


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """The methods of ``worker_cls`` marked with ``@register``, inherited ones included."""
    methods = {name: getattr(worker_cls, name, None) for name in dir(worker_cls)}
    return {name: getattr(method, _REGISTRATION) for name, method in methods.items() if hasattr(method, _REGISTRATION)}


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, *, all_ranks_report: bool = False) -> DispatchFns:
    """Splits over the data-parallel axis of a mesh that the workers registered under ``mesh_name``.

    With ``all_ranks_report`` the figures that each rank has in ``meta_info["by_rank"]`` are merged, also of the ranks
    whose rows are not collected; these must return a DataProto without rows.
    """

    def dispatch(group: Group, *args: Any, **kwargs: Any) -> list[RankCall]:
        mesh = group.mesh(mesh_name)
        try:
            return _part_calls(group, mesh.dp_ranks, mesh.dp_size, args, kwargs)
        except ValueError as error:
            raise BatchError(f"mesh {mesh_name!r} of group {group.name!r} (dp size {mesh.dp_size}): {error}") from error

    def collect(group: Group, outputs: list[Any]) -> Any:
        """Outputs of the collecting ranks in dp order, concatenated when they are DataProtos."""
        mesh = group.mesh(mesh_name)
        order = sorted((dp, rank) for rank, dp in enumerate(mesh.dp_ranks) if mesh.is_collect[rank])
        output = _joined(group, [outputs[rank] for _, rank in order])
        if all_ranks_report and isinstance(output, DataProto):
            reports = [DataProto(meta_info={BY_RANK: part.meta_info[BY_RANK]}) for part in outputs]
            output.meta_info |= DataProto.concat(reports).meta_info
        return output

    def kept(group: Group) -> list[bool]:
        return _keep_all(group) if all_ranks_report else list(group.mesh(mesh_name).is_collect)

    return DispatchFns(dispatch, collect, kept)


def _one_to_all(group: Group, *args: Any, **kwargs: Any) -> list[RankCall]:
    """The same arguments for every rank; a DataProto is stored once."""
    named = {key: _stored(group, value) for key, value in kwargs.items()}
    return [(tuple(_stored(group, value) for value in args), named)] * group.world_size


def _all_to_all(group: Group, *args: Any, **kwargs: Any) -> list[RankCall]:
    ranks = range(group.world_size)
    if not all(isinstance(value, list) and len(value) == len(ranks) for value in (*args, *kwargs.values())):
        return [(args, kwargs) for _ in ranks]
    return [(tuple(v[rank] for v in args), {key: v[rank] for key, v in kwargs.items()}) for rank in ranks]


def _equal_parts(group: Group, *args: Any, **kwargs: Any) -> list[RankCall]:
    return _part_calls(group, range(group.world_size), group.world_size, args, kwargs)


def _part_calls(
    group: Group, dp_ranks: Sequence[int], dp_size: int, args: tuple, kwargs: dict[str, Any]
) -> list[RankCall]:
    """Part ``dp_ranks[r]`` of every DataProto for rank r, each part stored once; other arguments as they are."""
    spread = [_parts(group, value, dp_size) for value in args]
    named = {key: _parts(group, value, dp_size) for key, value in kwargs.items()}
    return [(tuple(parts[dp] for parts in spread), {key: parts[dp] for key, parts in named.items()}) for dp in dp_ranks]


def _parts(group: Group, value: Any, dp_size: int) -> list[Any]:
    if not isinstance(value, DataProto):
        return [value] * dp_size
    if value.is_padding_enabled():
        value, _ = pad_dataproto_to_divisor(value, dp_size)
    return [group.put(part) for part in value.chunk(dp_size)]


def _stored(group: Group, value: Any) -> Any:
    return group.put(value) if isinstance(value, DataProto) else value


def _listed(group: Group, outputs: list[Any]) -> list[Any]:
    return outputs


def _joined(group: Group, outputs: list[Any]) -> Any:
    return DataProto.concat(outputs) if all(isinstance(part, DataProto) for part in outputs) else outputs


_MODES: dict[Any, DispatchFns] = {
    Dispatch.ONE_TO_ALL: DispatchFns(_one_to_all, _listed),
    Dispatch.ALL_TO_ALL: DispatchFns(_all_to_all, _listed),
    Dispatch.DP_COMPUTE_PROTO: DispatchFns(_equal_parts, _joined),
}
