"""DataProto: the batch that travels between the controller and the workers (tensors, row-wise objects, settings)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.protocol_storage import (
    AUTO_PADDING,
    as_rows,
    merged_settings,
    pack_tensor,
    tensors_of,
    union_dict,
    united_tensors,
    unpack_tensor,
)
from verl.row_refs import RowRefs
from verl.utils.errors import BatchError


@dataclass(eq=False)
class DataProtoItem:
    """One row: tensors without the batch dimension, plain objects, and the batch's settings."""

    batch: TensorDict | None = None
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class DataProto:
    """A batch of B rows (upstream: ``verl.protocol.DataProto``).

    Attributes:
        batch: tensors whose first dimension is B, or None when there are none.
        non_tensor_batch: arrays whose first dimension is B, usually of dtype object.
        meta_info: settings and reports of the whole batch; never split, shared by the parts of ``chunk``.
        row_refs: the columns of the B rows that stay on workers; every choice of rows applies to them too.

    ``DataProto()`` has length 0. Pickling copies exactly the rows that are there, to host memory.
    """

    batch: Any = None  # TensorDict | None, untyped so that readers need not exclude None
    non_tensor_batch: dict[str, np.ndarray] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)
    row_refs: RowRefs | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.non_tensor_batch = {} if self.non_tensor_batch is None else self.non_tensor_batch
        self.meta_info = {} if self.meta_info is None else self.meta_info
        self.check_consistency()

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor] | None = None,
        non_tensors: Mapping[str, Sequence | np.ndarray] | None = None,
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
        *,
        row_refs: RowRefs | None = None,
    ) -> DataProto:
        """Builds a batch; ValueError names the keys when the row counts differ.

        Args:
            auto_padding: calls that split the batch pad it to their parts, and cut the padding off their outputs.
        """
        tensors = dict(tensors or {})
        arrays = {key: as_rows(values) for key, values in (non_tensors or {}).items()}
        _require_equal_lengths(tensors, arrays, row_refs)
        batch = TensorDict(tensors, batch_size=next(iter(tensors.values())).shape[:1]) if tensors else None
        settings = dict(meta_info or {}) | ({AUTO_PADDING: True} if auto_padding else {})
        return cls(batch=batch, non_tensor_batch=arrays, meta_info=settings, row_refs=row_refs)

    @classmethod
    def from_single_dict(
        cls,
        data: Mapping[str, Tensor | np.ndarray],
        meta_info: dict[str, Any] | None = None,
        auto_padding: bool = False,
    ) -> DataProto:
        """Sorts the values of one dict into tensors and arrays; any other type is a ValueError."""
        tensors = {key: value for key, value in data.items() if isinstance(value, Tensor)}
        arrays = {key: value for key, value in data.items() if isinstance(value, np.ndarray)}
        wrong = [f"{key} ({type(data[key]).__name__})" for key in data if key not in tensors and key not in arrays]
        if wrong:
            raise BatchError(f"expected torch.Tensor or numpy.ndarray, got: {', '.join(wrong)}")
        return cls.from_dict(tensors, arrays, meta_info, auto_padding=auto_padding)

    def __len__(self) -> int:
        if self.batch is not None:
            return int(self.batch.batch_size[0])
        arrays = iter(self.non_tensor_batch.values())
        return len(next(arrays, self.row_refs or ()))

    @property
    def num_tensor_bytes(self) -> int:
        """Bytes of the rows of all tensors and references."""
        own = sum(tensor.nbytes for tensor in tensors_of(self.batch).values())
        return own + (0 if self.row_refs is None else self.row_refs.num_bytes)

    def __getitem__(self, item: int | np.integer | slice | Sequence | np.ndarray | Tensor) -> Any:
        """An int gives a ``DataProtoItem``; a slice, indices or a boolean mask give a ``DataProto``."""
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, int | np.integer):
            row = int(item)
            return DataProtoItem(
                batch=None if self.batch is None else self.batch[row],
                non_tensor_batch={key: array[row] for key, array in self.non_tensor_batch.items()},
                meta_info=self.meta_info,
            )
        if not isinstance(item, list | tuple | range | np.ndarray | Tensor):
            raise TypeError(f"rows are chosen by a number, a slice, numbers or a mask, got a {type(item).__name__}")
        return self.select_idxs(item)

    def check_consistency(self) -> None:
        """ValueError when a field has the wrong type or another number of rows."""
        for key, array in self.non_tensor_batch.items():
            if not isinstance(array, np.ndarray):
                raise BatchError(f"non_tensor_batch[{key!r}] is a {type(array).__name__}, expected numpy.ndarray")
        if self.batch is not None and self.batch.ndim != 1:
            raise BatchError(f"batch has batch_size {tuple(self.batch.batch_size)}, expected one dimension")
        _require_equal_lengths(tensors_of(self.batch), self.non_tensor_batch, self.row_refs)

    def to(self, device: torch.device | str) -> DataProto:
        if self.batch is not None:
            self.batch = self.batch.to(device)
        return self

    # Choosing columns

    def select(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> DataProto:
        """The named columns (None: all of them) and all remote ones; an unknown key is a ValueError.

        They share memory with this batch's unless ``deepcopy`` is given.
        """
        tensor_keys = list(tensors_of(self.batch) if batch_keys is None else batch_keys)
        array_keys = list(self.non_tensor_batch if non_tensor_batch_keys is None else non_tensor_batch_keys)
        meta_keys = list(self.meta_info if meta_info_keys is None else meta_info_keys)
        self._require_keys(tensor_keys, array_keys, meta_keys)
        selected = DataProto(
            batch=None if self.batch is None else self.batch.select(*tensor_keys),
            non_tensor_batch={key: self.non_tensor_batch[key] for key in array_keys},
            meta_info={key: self.meta_info[key] for key in meta_keys},
            row_refs=self.row_refs,
        )
        return copy.deepcopy(selected) if deepcopy else selected

    def pop(
        self,
        batch_keys: Iterable[str] | None = None,
        non_tensor_batch_keys: Iterable[str] | None = None,
        meta_info_keys: Iterable[str] | None = None,
    ) -> DataProto:
        """Moves the named columns (None: none) out of this batch into a new one; remote columns stay."""
        tensor_keys, array_keys = list(batch_keys or ()), list(non_tensor_batch_keys or ())
        meta_keys = list(meta_info_keys or ())
        popped = self.select(tensor_keys, array_keys, meta_keys)
        popped.row_refs = None
        if not tensor_keys:
            popped.batch = None
        elif self.batch is not None:
            self.batch = self.batch.exclude(*tensor_keys)  # without columns it still has its rows
        for key in array_keys:
            del self.non_tensor_batch[key]
        for key in meta_keys:
            del self.meta_info[key]
        return popped

    def rename(
        self, old_keys: str | Sequence[str] | None = None, new_keys: str | Sequence[str] | None = None
    ) -> DataProto:
        """Gives tensor columns new names, in place."""
        old = [old_keys] if isinstance(old_keys, str) else list(old_keys or ())
        new = [new_keys] if isinstance(new_keys, str) else list(new_keys or ())
        if len(old) != len(new):
            raise BatchError(f"rename needs as many new keys as old ones, got {old} and {new}")
        self._require_keys(old, [], [])
        columns = tensors_of(self.batch)
        renamed = {dict(zip(old, new, strict=True)).get(key, key): value for key, value in columns.items()}
        if len(renamed) != len(columns):
            raise BatchError(f"renaming {old} to {new} would overwrite a column of {sorted(columns)}")
        if self.batch is not None:
            self.batch = TensorDict(renamed, batch_size=self.batch.batch_size)
        return self

    def union(self, other: DataProto) -> DataProto:
        """Adds the columns of ``other`` in place; a key in both is a ValueError unless the values are equal."""
        if self._has_rows() and other._has_rows() and len(self) != len(other):
            raise BatchError(f"union of batches of {len(self)} and {len(other)} rows")
        batch = united_tensors(self.batch, other.batch)
        arrays = union_dict(self.non_tensor_batch, other.non_tensor_batch, "non_tensor_batch")
        meta_info = union_dict(self.meta_info, other.meta_info, "meta_info")
        refs = [batch.row_refs for batch in (self, other) if batch.row_refs is not None]
        self.row_refs = refs[0].union(refs[-1]) if refs else None
        self.batch, self.non_tensor_batch, self.meta_info = batch, arrays, meta_info
        return self

    # Choosing rows

    def select_idxs(self, idxs: Sequence | np.ndarray | Tensor) -> DataProto:
        """Copies the rows of ``idxs``: int indices in the given order, or a boolean mask [B]."""
        rows = idxs.detach().cpu().numpy() if isinstance(idxs, Tensor) else np.asarray(idxs)
        if rows.size == 0:
            rows = rows.astype(np.int64)
        if rows.dtype == np.bool_:
            if rows.shape != (len(self),):
                raise BatchError(f"mask of shape {rows.shape} for a batch of {len(self)} rows")
            rows = np.flatnonzero(rows)
        if not np.issubdtype(rows.dtype, np.integer):
            raise BatchError(f"rows are chosen by integers or by a mask, got {rows.dtype}")
        index = torch.from_numpy(np.ascontiguousarray(rows))
        return self._choose_rows(lambda tensor: tensor[index.to(tensor.device)], rows)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> DataProto:
        """Rows ``start:end:step`` as views."""
        rows = slice(start, end, step)
        if step is not None and step < 0:
            return self.select_idxs(np.arange(len(self))[rows])
        return self._choose_rows(lambda tensor: tensor[rows], rows)

    def reorder(self, indices: Sequence | np.ndarray | Tensor) -> None:
        ordered = self.select_idxs(indices)
        self.batch, self.non_tensor_batch, self.row_refs = ordered.batch, ordered.non_tensor_batch, ordered.row_refs

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> DataProto:
        """Every row ``repeat_times`` times: a a b b when interleaved, a b a b otherwise."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

    def is_padding_enabled(self) -> bool:
        """Whether calls that split this batch pad it (``auto_padding``)."""
        return bool(self.meta_info.get(AUTO_PADDING, False))

    def chunk(self, chunks: int) -> list[DataProto]:
        """``chunks`` equal parts as views; ValueError when the rows do not divide, unless padding is enabled.

        With padding enabled the last parts are shorter, as ``torch.chunk`` cuts them.
        """
        if chunks < 1 or (len(self) % chunks and not self.is_padding_enabled()):
            raise BatchError(
                f"a batch of {len(self)} rows does not split into {chunks} equal chunks; "
                f"use a multiple of {chunks} rows or pad with pad_dataproto_to_divisor"
            )
        size = -(-len(self) // chunks)
        return [self.slice(index * size, (index + 1) * size) for index in range(chunks)]

    def split(self, split_size: int) -> list[DataProto]:
        """Parts of ``split_size`` rows as views; the last may be shorter."""
        if split_size < 1:
            raise BatchError(f"split_size is {split_size}, expected at least 1")
        return [self.slice(start, start + split_size) for start in range(0, len(self), split_size)]

    @staticmethod
    def concat(data: Sequence[DataProto]) -> DataProto:
        """Rows of all parts, in order; parts without rows are skipped, different columns are a ValueError.

        The settings of all parts are merged, and a key with different values is an error; ``metrics``, a dict or a
        list of dicts in each part, become one dict of lists, ``timing`` is the first part's, ``by_rank`` is joined.
        """
        parts = [part for part in data if len(part)] or list(data[:1])
        if not parts:
            return DataProto()
        meta_info, first = merged_settings([part.meta_info for part in data]), parts[0]
        for i, part in enumerate(parts):
            if part._columns() != first._columns():
                raise BatchError(f"concat: part 0 has columns {first._columns()}, part {i} has {part._columns()}")
        batch = None
        if first.batch is not None:
            tensors = [tensors_of(part.batch) for part in parts]
            columns = {key: torch.cat([columns[key] for columns in tensors]) for key in tensors[0]}
            batch = TensorDict(columns, batch_size=[sum(map(len, parts))])
        arrays = {key: np.concatenate([part.non_tensor_batch[key] for part in parts]) for key in first.non_tensor_batch}
        refs = [part.row_refs for part in parts if part.row_refs is not None]
        return DataProto(batch, arrays, meta_info, row_refs=RowRefs.concat(refs) if refs else None)

    # Leaving the process

    def __getstate__(self) -> dict[str, Any]:
        # A view pickles its whole storage; raw bytes of the rows also let Ray keep them out of band.
        return {
            "tensors": {key: pack_tensor(tensor) for key, tensor in tensors_of(self.batch).items()},
            "batch_size": () if self.batch is None else tuple(self.batch.batch_size),
            "non_tensor_batch": self.non_tensor_batch,
            "meta_info": self.meta_info,
            "row_refs": self.row_refs,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = {key: unpack_tensor(*packed) for key, packed in state["tensors"].items()}
        self.batch = TensorDict(tensors, batch_size=state["batch_size"]) if state["batch_size"] else None
        arrays = state["non_tensor_batch"]  # Ray hands out read-only memory of its store
        self.non_tensor_batch = {key: array if array.flags.writeable else array.copy() for key, array in arrays.items()}
        self.meta_info, self.row_refs = state["meta_info"], state["row_refs"]

    def _columns(self) -> list[str]:
        remote = [] if self.row_refs is None else [f"remote {name}" for name in self.row_refs.columns]
        return sorted(tensors_of(self.batch)) + sorted(self.non_tensor_batch) + sorted(remote)

    def _has_rows(self) -> bool:
        return self.batch is not None or bool(self.non_tensor_batch) or self.row_refs is not None

    def _choose_rows(self, of_tensor: Callable[[Tensor], Tensor], rows: Any) -> DataProto:
        tensors = {key: of_tensor(tensor) for key, tensor in tensors_of(self.batch).items()}
        arrays = {key: array[rows] for key, array in self.non_tensor_batch.items()}
        refs = None if self.row_refs is None else self.row_refs.rows(rows)
        return DataProto.from_dict(tensors, arrays, self.meta_info, row_refs=refs)

    def _require_keys(self, batch_keys: list[str], array_keys: list[str], meta_keys: list[str]) -> None:
        named = (
            ("batch", batch_keys, list(tensors_of(self.batch))),
            ("non_tensor_batch", array_keys, list(self.non_tensor_batch)),
            ("meta_info", meta_keys, list(self.meta_info)),
        )
        problems = [
            f"{place} has no {missing}, only {sorted(present)}"
            for place, keys, present in named
            if (missing := [key for key in keys if key not in present])
        ]
        if problems:
            raise BatchError("; ".join(problems))


def _require_equal_lengths(
    tensors: Mapping[str, Tensor], arrays: Mapping[str, np.ndarray], row_refs: RowRefs | None
) -> None:
    remote = {} if row_refs is None else {f"remote {key}": places for key, places in row_refs.columns.items()}
    columns: dict[str, Any] = {**tensors, **arrays, **remote}
    scalars = [key for key, column in columns.items() if not column.shape]
    if scalars:
        raise BatchError(f"columns without a batch dimension: {scalars}")
    lengths = {key: int(column.shape[0]) for key, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise BatchError(f"columns of one batch have different numbers of rows: {lengths}")
