"""The weights of one rank: built, loaded, replaced, compared, and their memory while training has the device."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from hf_formats.cores import usable_cores
from hf_formats.finite import note_finite, require_noted
from hf_formats.fp8 import SCALE_SUFFIX
from vllm.model_executor.model_loader.checkpoint_reader import CheckpointReader, each_once, iterate_dummy
from vllm.model_executor.model_loader.collect_digests import collect_digests, shard_digests
from vllm.model_executor.model_loader.digest import WeightDigest
from vllm.model_executor.model_loader.fp8_weight_view import (
    Fp8Pairs,
    fp8_products_in_words,
    hold_in_fp8,
    weight_storage,
)
from vllm.model_executor.model_loader.shard_writer import ShardWriter
from vllm.model_executor.models.causal_lm import CausalLM
from vllm.v1.worker.rank_context import RankContext

logger = logging.getLogger(__name__)


class WeightMemory:
    """A model's weights, in one of three states: allocated, freed with a copy on the host, or freed without one.

    Attributes:
        names_to_load: weights without values that count: after they were freed without a copy, or by a failed update.
    """

    def __init__(self, rank: RankContext) -> None:
        # Torch takes as many threads as the process may use cores, but sees no container's limit of their time.
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        self._config, self._platform = rank.config, rank.platform
        self._parallel, self._device = rank.parallel, rank.device
        self._keeps_address = rank.keeps_address
        self.model = _new_model(rank)
        for tensor in self.tensors:
            self._platform.prefer_large_pages(tensor)
        self.names_to_load: set[str] = set()
        self._fp8_pairs = Fp8Pairs()
        self.is_allocated = True
        self._on_host: list[Tensor] = []
        self._kept_bytes = 0  # on the device while freed
        self._load_initial()

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that holds weights."""
        return weight_storage(self.model)

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now."""
        if not self.is_allocated:
            return self._kept_bytes
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors)

    @property
    def host_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._on_host)

    def free(self, keeps_copy: bool) -> None:
        """Give the memory back; without a copy on the host all weights have to be loaded again."""
        if not self.is_allocated:
            return
        self._kept_bytes = 0
        if not keeps_copy:
            self._count_none_as_loaded()
        # NPU-ADAPTATION(sleep-frees-storage): freed by hand, tensor by tensor: the memory pool that sleeps as a whole
        # keeps device memory on runs over several nodes; drop when that pool gives all of its memory back there.
        for tensor in self.tensors:
            if keeps_copy:
                self._on_host.append(tensor.to("cpu", copy=True))
            self._kept_bytes += self._platform.free(tensor, keeps_address=self._keeps_address)
        # NPU-ADAPTATION END
        self.is_allocated = False

    def allocate(self) -> None:
        """Take the memory again; values come from the copy on the host, or are undefined until they are loaded."""
        if self.is_allocated:
            return
        tensors = self.tensors
        for tensor in tensors:
            self._platform.allocate(tensor, zeroed=False)
            self._platform.prefer_large_pages(tensor)
        if self._on_host:
            for tensor, copy in zip(tensors, self._on_host, strict=True):
                tensor.copy_(copy)
        self._on_host = []
        self.is_allocated = True

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (hf_name, full tensor) pairs; RuntimeError while the weights sleep.

        When it raises, all weights count as not loaded: some are new by then and some are not. ValueError names those
        that hold NaN or infinity.
        """
        self._require_allocated("load_weights")
        with self._all_or_nothing():
            return self._load(weights)

    def start_update(self, action: str = "start_weight_update") -> None:
        """Expect every weight, in any number of `load`; until `check_loaded` none counts as loaded."""
        self._require_allocated(action)
        self._count_none_as_loaded()

    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace every weight, each once.

        ValueError for a name that is unknown, comes twice or is missing; the weights then count as not loaded.
        """
        self.start_update("update_weights")
        with self._all_or_nothing():
            self._load(each_once(weights))
            self.check_loaded()

    @contextmanager
    def update_shards(self) -> Iterator[ShardWriter]:
        """Replace all shards of this rank, each element once; see `LLM.update_weight_shards`."""
        self.start_update("update_weight_shards")
        writer = ShardWriter(self.model.weight_views)
        yield writer
        writer.finish()
        self.model.renew_weight_copies(self.model.weight_views)
        self.names_to_load = set()

    def check_loaded(self) -> None:
        """Raise ValueError for weights that were not loaded since the model was built, since a level-2 sleep, or since
        the start of an update.
        """
        unpaired = sorted(self._fp8_pairs.unpaired)
        if unpaired:
            raise ValueError(
                f"{len(unpaired)} FP8 weights came without their scales ({SCALE_SUFFIX}), or scales without their "
                f"weights: {', '.join(unpaired[:20])}"
            )
        if self.names_to_load:
            missing = sorted(self.names_to_load)
            shown = ", ".join(missing[:20]) + (f" and {len(missing) - 20} more" if len(missing) > 20 else "")
            raise ValueError(f"{len(missing)} weights were not loaded: {shown}")

    def digests(self) -> dict[str, WeightDigest]:
        """See `LLM.weights_digest`."""
        self._require_allocated("weights_digest")
        self.check_loaded()
        return collect_digests(self.model.weight_views, self._parallel, self._device)

    def shard_digests(self) -> dict[str, WeightDigest]:
        """See `LLM.shard_digests`."""
        self._require_allocated("shard_digests")
        self.check_loaded()
        return shard_digests(self.model.weight_views)

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        are_finite: list[tuple[str, Tensor]] = []

        def checked() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                note_finite(are_finite, name, tensor)
                yield name, tensor

        loaded = self.model.load_weights(self._fp8_pairs.joined(checked()))
        require_noted(are_finite, "the update")
        self.names_to_load -= loaded
        return loaded

    def _load_initial(self) -> None:
        views, model = self.model.weight_views, self._config.model
        owned = {name for name, view in views.items() if view.parameter is not None}
        if self._platform.holds_values and self._config.load_format == "dummy":
            self.model.load_weights(iterate_dummy(views, model.seed))
        elif self._platform.holds_values:
            reader = CheckpointReader(model.model, model.hf.tie_word_embeddings)
            try:
                wanted = reader.weights(lambda name: name not in views or name in owned)
                self.names_to_load = owned - self.model.load_weights(wanted)
            finally:
                reader.close()
            self.check_loaded()
            logger.info("read %.3f GB of %s", reader.bytes_read / 1e9, model.model)
        self.names_to_load = set()

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._count_none_as_loaded()
            raise

    def _count_none_as_loaded(self) -> None:
        self.names_to_load = set(self.model.weight_views)
        self._fp8_pairs = Fp8Pairs()

    def _require_allocated(self, action: str) -> None:
        if not self.is_allocated:
            raise RuntimeError(f'{action} while the weights sleep: call wake_up(tags=["weights"]) first')


def _new_model(rank: RankContext) -> CausalLM:
    config, ops = rank.config, rank.ops
    is_fp8 = config.model.quantization == "fp8"
    if is_fp8:  # FP8 blocks replace the tensors of the weights
        ops = replace(ops, new_weight=partial(ops.new_weight, may_pack=False))
        if ops.multiplies_fp8:  # the one weight that decode steps would dequantise: see MultiHeadLatentAttention
            ops = replace(ops, copies_strided_weights=True)
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, config.model.dtype))
    try:
        with rank.device:
            model = CausalLM(config.model.hf, config.model.max_model_len, rank.parallel, ops, rank.device)
    finally:
        torch.set_default_dtype(default_dtype)
    if is_fp8:
        model.weight_views = hold_in_fp8(model.weight_views)
        logger.info("weights held in FP8: %s", fp8_products_in_words(model, ops))
    return model
