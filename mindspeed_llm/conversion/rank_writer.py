"""Output kind: MindSpeed-LLM's file layout, ``iter_0000001/mp_rank_TT_PPP_EEE/model_optim_rng.pt`` for each rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from hf_formats.config import HFModelConfig, parse_hf_config
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.conversion.torch_file import TensorRef, TorchFile, torch_file_layout
from mindspeed_llm.conversion.writer import ByteSlabs, FileRecord, StoredTensor
from mindspeed_llm.sharded_checkpoint import ITERATION, LATEST_NAME, place_in_file, rank_file, write_layout
from mindspeed_llm.weight_plan import Naming, TensorPlan, local_plan
from mindspeed_llm.weight_source import WeightSource, stored_dtype


@dataclass(frozen=True)
class RankWriter:
    """One file per rank of ``layout``, in the dtypes of ``source`` (BF16 for FP8), and layout.json.

    A file is ``{"model": {name: tensor}, "checkpoint_version": 3.0, "iteration": 1}``, with virtual stages "model0",
    "model1" ... instead of "model". ``hf_config`` is config.json as read.
    """

    source: WeightSource
    hf_config: Mapping[str, Any]
    mtp_num_layers: int
    layout: ParallelLayout
    naming: Naming
    kind: ClassVar[str] = "mp_rank"

    def files(self) -> Sequence[str]:
        return list(self._rank_of)

    def tensors(self, file: str) -> Sequence[StoredTensor]:
        plan = local_plan(self._hf, self.layout, self._rank_of[file], self.naming)
        return [self._stored(tensor) for tensor in plan]

    def file_bytes(self, file: str) -> int:
        return self._file(file).num_bytes

    def write(self, file: str, stream: BinaryIO, slabs: Callable[[StoredTensor], ByteSlabs]) -> Mapping[str, int]:
        """One file as torch.save writes it."""
        return self._file(file).write(stream, slabs)

    def finish(self, directory: Path, records: Mapping[str, FileRecord]) -> None:
        """The iteration's number, as Megatron looks it up, and the layout, for the way back."""
        (directory / LATEST_NAME).write_text(str(ITERATION))
        sizes = {file: records[file].num_bytes for file in self.files()}
        write_layout(directory, self.naming, self.layout, self.hf_config, self.mtp_num_layers, sizes)

    def _file(self, file: str) -> TorchFile:
        tensors = self.tensors(file)
        models: dict[str, dict[str, TensorRef]] = {}
        for key, tensor in enumerate(tensors):
            model, name = place_in_file(tensor.content)
            models.setdefault(model, {})[name] = TensorRef(key, tensor.shape, tensor.dtype)
        content = {**models, "checkpoint_version": 3.0, "iteration": ITERATION}
        return torch_file_layout(content, tensors, stem="model_optim_rng")

    def _stored(self, tensor: TensorPlan) -> StoredTensor:
        dtype = stored_dtype(self.source, tensor)
        return StoredTensor(tensor.name, tensor.file_shape or tensor.shape, dtype, tensor)

    @cached_property
    def _hf(self) -> HFModelConfig:
        return parse_hf_config(self.hf_config).with_mtp(self.mtp_num_layers)

    @cached_property
    def _rank_of(self) -> Mapping[str, int]:
        return {rank_file(self.layout, self.layout.coords(rank)): rank for rank in range(self.layout.world_size)}
