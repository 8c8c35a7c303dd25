"""Views of the weights that an op table made: of a tensor, or of a whole matrix of a packed weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vllm.model_executor.model_loader import weight_view
from vllm.model_executor.model_loader.shard import Shard
from vllm.model_executor.model_loader.weight_view import WeightView
from vllm.ops.weights import PackedMatrix, PackedWeight, Weight


@dataclass(frozen=True)
class PackedWeightView(WeightView):
    """`matrix` is hf_tensor[source]; `parameter` is the memory of the packed weight that it belongs to."""

    matrix: PackedMatrix | None = None

    def store(self, name: str, weight: weight_view.Weight) -> None:
        assert self.matrix is not None, name
        values = self.part(name, weight, self.matrix.dtype)
        self.matrix.write(values.to(self.matrix.device, self.matrix.dtype))

    def shards(self, name: str) -> Iterator[tuple[str, Shard]]:
        assert self.matrix is not None, name
        yield name, Shard(self.hf_shape, self.ranges(), self.matrix.dtype, self.matrix)


def view_of(
    weight: Weight,
    hf_shape: tuple[int, ...],
    source: tuple[slice, ...],
    part: int,
    rows: slice,
    expert: int | None = None,
) -> WeightView:
    """The view of hf_tensor[source] in a weight: its part number `part`, which is `rows` of it, of `expert` if any."""
    if isinstance(weight, PackedWeight):
        return PackedWeightView(hf_shape, weight.memory, source=source, matrix=weight.matrix(expert or 0, part))
    return WeightView(hf_shape, weight, (rows,) if expert is None else (expert, rows), source)
