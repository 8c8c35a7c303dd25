"""`@register`: how the arguments of a group call reach the ranks and how their outputs come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeVar

from verl.protocol import BY_RANK, DataProto, pad_dataproto_to_divisor
from verl.single_controller.base.mesh import Mesh
from verl.utils.errors import BatchError

MAGIC_ATTR = "attrs_3141562937"  # upstream's: what a method has that a group may call

Method = TypeVar("Method", bound=Callable[..., Any])
RankCall = tuple[tuple, dict[str, Any]]
Spread = tuple[tuple, dict[str, Any]]  # every argument as a list with one entry per rank


class Group(Protocol):
    """What dispatching asks of a group of workers."""

    name: str

    @property
    def world_size(self) -> int: ...

    def mesh(self, mesh_name: str) -> Mesh: ...


class Dispatch(Enum):
    """Named ways to spread a call over the ranks."""

    RANK_ZERO = "rank 0 alone runs the call"
    ONE_TO_ALL = "every rank gets the same arguments; a list of outputs comes back"
    ALL_TO_ALL = "lists with one entry per rank are spread, other arguments go to every rank"
    DP_COMPUTE = "every argument is a list with one entry per rank; a list of outputs comes back"
    DP_COMPUTE_PROTO = "every rank gets one equal part of each DataProto; outputs are concatenated"
    DP_COMPUTE_PROTO_WITH_FUNC = "the same; the first argument is a function that every rank gets"
    DP_COMPUTE_METRIC = "parts as DP_COMPUTE_PROTO; a list of outputs comes back"


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
    dispatch_mode: Dispatch | DispatchFns | Mapping[str, Callable[..., Any]] = Dispatch.ALL_TO_ALL,
    execute_mode: Execute = Execute.ALL,
) -> Callable[[Method], Method]:
    """Makes a worker's method callable on its group.

    Args:
        dispatch_mode: a mode, or ``{"dispatch_fn": ..., "collect_fn": ...}``: functions that take the group first.
    """
    _check_dispatch_mode(dispatch_mode)
    _check_execute_mode(execute_mode)
    is_rank_zero = execute_mode is Execute.RANK_ZERO or dispatch_mode is Dispatch.RANK_ZERO
    if isinstance(dispatch_mode, DispatchFns):
        fns = dispatch_mode
    elif is_rank_zero and dispatch_mode is Dispatch.ALL_TO_ALL:
        fns = _users_fns(dispatch_one_to_all, collect_all_to_all)  # a list is no list of ranks' values
    else:
        functions = get_predefined_dispatch_fn(dispatch_mode) if isinstance(dispatch_mode, Dispatch) else dispatch_mode
        fns = _users_fns(**functions)
    registration = Registration(fns, is_rank_zero)

    def mark(method: Method) -> Method:
        setattr(method, MAGIC_ATTR, registration)
        return method

    return mark


def _check_dispatch_mode(dispatch_mode: Any) -> None:
    """AssertionError: not a mode, nor a mapping with the two functions of one."""
    if isinstance(dispatch_mode, Mapping):
        if missing := sorted({"dispatch_fn", "collect_fn"} - set(dispatch_mode)):
            raise BatchError(f"a dispatch mode of functions needs {missing}")
    elif not isinstance(dispatch_mode, Dispatch | DispatchFns):
        raise BatchError(
            f"dispatch_mode is {dispatch_mode!r}; expected one of {[mode.name for mode in Dispatch]}, or its functions"
        )


def _check_execute_mode(execute_mode: Any) -> None:
    if not isinstance(execute_mode, Execute):
        raise BatchError(f"execute_mode is {execute_mode!r}; expected one of {[mode.name for mode in Execute]}")


def registered_methods(worker_cls: type) -> dict[str, Registration]:
    """The methods of ``worker_cls`` marked with ``@register``, inherited ones included."""
    methods = {name: getattr(worker_cls, name, None) for name in dir(worker_cls)}
    return {name: getattr(method, MAGIC_ATTR) for name, method in methods.items() if hasattr(method, MAGIC_ATTR)}


def dispatch_one_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """The same arguments for every rank; a DataProto is stored once."""
    size = worker_group.world_size
    shared = tuple([_shared(worker_group, value)] * size for value in args)
    return shared, {key: [_shared(worker_group, value)] * size for key, value in kwargs.items()}


def dispatch_all_to_all(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """Every argument as it is: a group spreads lists with one entry per rank, when all arguments are such lists."""
    return args, kwargs


def collect_all_to_all(worker_group: Any, output: list[Any]) -> list[Any]:
    return output


def dispatch_dp_compute(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """Every argument as it is: a list with one entry per rank; an AssertionError for another one."""
    named = {**{f"argument {i}": value for i, value in enumerate(args)}, **kwargs}
    for name, value in named.items():
        if not isinstance(value, list | tuple) or len(value) != worker_group.world_size:
            raise BatchError(
                f"{name} must be a list of {worker_group.world_size} entries, one per rank, got {value!r:.200}"
            )
    return tuple(list(value) for value in args), {key: list(value) for key, value in kwargs.items()}


def collect_dp_compute(worker_group: Any, output: list[Any]) -> list[Any]:
    return output


def dispatch_dp_compute_data_proto(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """One equal part of each DataProto for every rank, other arguments as they are."""
    return _spread_parts(worker_group, list(range(worker_group.world_size)), worker_group.world_size, args, kwargs)


def dispatch_dp_compute_data_proto_with_func(worker_group: Any, *args: Any, **kwargs: Any) -> Spread:
    """The same; the first argument is a function, which every rank gets."""
    if not args or not callable(args[0]):
        raise BatchError("the first argument of such a call is a function")
    parts, named = dispatch_dp_compute_data_proto(worker_group, *args[1:], **kwargs)
    return ([args[0]] * worker_group.world_size, *parts), named


def collect_dp_compute_data_proto(worker_group: Any, output: list[Any]) -> Any:
    """The outputs in rank order, concatenated when they are DataProtos."""
    return _joined(output)


def get_predefined_dispatch_fn(dispatch_mode: Any) -> dict[str, Callable[..., Any]]:
    """``dispatch_fn`` and ``collect_fn`` of a registered mode."""
    return DISPATCH_MODE_FN_REGISTRY[dispatch_mode]


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str, *, all_ranks_report: bool = False) -> DispatchFns:
    """Splits over the data-parallel axis of a mesh that the workers registered under ``mesh_name``.

    With ``all_ranks_report`` the figures that each rank has in ``meta_info["by_rank"]`` are merged, also of the ranks
    whose rows are not collected; these must return a DataProto without rows.
    """

    def dispatch(group: Group, *args: Any, **kwargs: Any) -> list[RankCall]:
        """Part ``dp_ranks[r]`` of every DataProto for rank r, each part stored once; other arguments as they are."""
        mesh = group.mesh(mesh_name)
        try:
            spread_args = [_parts(group, value, mesh.dp_size) for value in args]
            spread_kwargs = {key: _parts(group, value, mesh.dp_size) for key, value in kwargs.items()}
        except ValueError as error:
            raise BatchError(f"mesh {mesh_name!r} of group {group.name!r} (dp size {mesh.dp_size}): {error}") from error
        return [
            (tuple(parts[dp] for parts in spread_args), {key: parts[dp] for key, parts in spread_kwargs.items()})
            for dp in mesh.dp_ranks
        ]

    def collect(group: Group, outputs: list[Any]) -> Any:
        """Outputs of the collecting ranks in dp order, concatenated when they are DataProtos."""
        mesh = group.mesh(mesh_name)
        order = sorted((dp, rank) for rank, dp in enumerate(mesh.dp_ranks) if mesh.is_collect[rank])
        collected = [outputs[rank] for _, rank in order]
        output = _joined(collected)
        if not isinstance(output, DataProto):
            return output
        if all_ranks_report:
            reports = [DataProto(meta_info={BY_RANK: part.meta_info[BY_RANK]}) for part in outputs]
            output.meta_info |= DataProto.concat(reports).meta_info
        return output

    def kept(group: Group) -> list[bool]:
        return _keep_all(group) if all_ranks_report else list(group.mesh(mesh_name).is_collect)

    return DispatchFns(dispatch, collect, kept)


def _shared(group: Group, value: Any) -> Any:
    put = getattr(group, "put", None)  # any object with a world_size will do for the functions above
    return put(value) if put is not None and isinstance(value, DataProto) else value


def _parts(group: Group, value: Any, dp_size: int) -> list[Any]:
    if not isinstance(value, DataProto):
        return [value] * dp_size
    if value.is_padding_enabled():
        value, _ = pad_dataproto_to_divisor(value, dp_size)
    return [_shared(group, part) for part in value.chunk(dp_size)]


def _spread_parts(group: Any, dp_ranks: list[int], dp_size: int, args: tuple, kwargs: dict[str, Any]) -> Spread:
    spread = tuple(_parts(group, value, dp_size) for value in args)
    named = {key: _parts(group, value, dp_size) for key, value in kwargs.items()}
    return tuple([parts[dp] for dp in dp_ranks] for parts in spread), {
        key: [parts[dp] for dp in dp_ranks] for key, parts in named.items()
    }


def _joined(outputs: list[Any]) -> Any:
    return DataProto.concat(outputs) if all(isinstance(part, DataProto) for part in outputs) else outputs


def _users_fns(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> DispatchFns:
    return DispatchFns(partial(_rank_calls, dispatch_fn), collect_fn)


def _rank_calls(dispatch_fn: Callable[..., Spread], group: Group, *args: Any, **kwargs: Any) -> list[RankCall]:
    """The arguments of each rank: its entries, if all are lists with one per rank, else all of them as they are."""
    spread, named = dispatch_fn(group, *args, **kwargs)
    ranks = range(group.world_size)
    if not all(isinstance(v, list) and len(v) == group.world_size for v in (*spread, *named.values())):
        return [(tuple(spread), named) for _ in ranks]
    return [(tuple(v[rank] for v in spread), {key: v[rank] for key, v in named.items()}) for rank in ranks]


def _fns(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {"dispatch_fn": dispatch_fn, "collect_fn": collect_fn}


DISPATCH_MODE_FN_REGISTRY: dict[Any, dict[str, Callable[..., Any]]] = {
    Dispatch.RANK_ZERO: _fns(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ONE_TO_ALL: _fns(dispatch_one_to_all, collect_all_to_all),
    Dispatch.ALL_TO_ALL: _fns(dispatch_all_to_all, collect_all_to_all),
    Dispatch.DP_COMPUTE: _fns(dispatch_dp_compute, collect_dp_compute),
    Dispatch.DP_COMPUTE_PROTO: _fns(dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_PROTO_WITH_FUNC: _fns(dispatch_dp_compute_data_proto_with_func, collect_dp_compute_data_proto),
    Dispatch.DP_COMPUTE_METRIC: _fns(dispatch_dp_compute_data_proto, collect_dp_compute),
}
