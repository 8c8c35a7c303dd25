"""Whether the rollout engine holds what the trainer trains, by the digest of every tensor under its HF name."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.core.parallel_state import ProcessGroups
from mindspeed_llm.gathering import DEFAULT_BUCKET_BYTES, gather_hf_tensors
from mindspeed_llm.hf_config import HFModelConfig
from mindspeed_llm.hf_shapes import always_fp32, hf_tensors
from mindspeed_llm.sources import hf_view
from mindspeed_llm.weight_plan import fragments
from vllm.model_executor.layers.quantization.fp8 import FP8_DTYPE, SCALE_SUFFIX, quantize
from vllm.model_executor.model_loader.digest import WeightDigest, differences, digest, slice_digest

_SHOWN = 12


def check_rollout_weights(
    model: torch.nn.Module,
    hf: HFModelConfig,
    groups: ProcessGroups,
    found: dict[str, WeightDigest],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> None:
    """RuntimeError, on every rank, naming the weights of a rank's rollout engine (``found``) that are not those of
    ``model``. Collective over ``groups.world``.
    """
    mine = differences(trainer_digests(model, hf, groups, found, bucket_bytes), found)
    of_ranks: list[tuple[int, list[str]]] = [(0, [])] * groups.world.size()
    dist.all_gather_object(of_ranks, (len(mine), mine[:_SHOWN]), group=groups.world)
    wrong = [(rank, count, shown) for rank, (count, shown) in enumerate(of_ranks) if count]
    if wrong:
        rank, count, shown = wrong[0]
        lines = [*shown, *([f"and {count - _SHOWN} more"] if count > _SHOWN else [])]
        raise RuntimeError(
            f"{count} weights of rank {rank}'s rollout engine differ from the trainer's after the sync (ranks with "
            f"differences: {', '.join(str(r) for r, _, _ in wrong)}):\n" + "\n".join(f"  - {line}" for line in lines)
        )


@torch.no_grad()
def trainer_digests(
    model: torch.nn.Module,
    hf: HFModelConfig,
    groups: ProcessGroups,
    like: dict[str, WeightDigest],
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> dict[str, WeightDigest]:
    """HF name -> digest of the trainer's tensor in the dtype that the rollout engine's has in ``like``.

    Every fragment is digested where it is trained and the sums go over ``groups.world``, beside the way that the
    weights took. Only tensors that are FP8 in ``like`` are gathered, for their blocks reach over fragments.
    """
    params = model.state_dict(keep_vars=True)
    first = next(model.parameters())
    fp8_names = {name for name in hf_tensors(hf) if name in like and like[name].dtype == FP8_DTYPE}
    names = [name for name in hf_tensors(hf) if name not in fp8_names]
    sums_N = torch.zeros(len(names), dtype=torch.int64, device=first.device)
    plan = fragments(hf, groups.layout, "core")
    dtypes = {name: like[name].dtype if name in like else first.dtype for name in names}
    for index, name in enumerate(names):
        sent_dtype = torch.float32 if always_fp32(name) else first.dtype
        for fragment in plan[name]:
            if fragment.owner == groups.rank:
                part = hf_view(params[fragment.local_name], fragment.piece).to(sent_dtype).to(dtypes[name])
                sums_N[index] += slice_digest(part, tuple(start for start, _ in fragment.piece.hf_slice))
    dist.all_reduce(sums_N, group=groups.world)
    result = {
        name: WeightDigest(hf_tensors(hf)[name][0], dtypes[name], value % 2**64)
        for name, value in zip(names, sums_N.tolist(), strict=True)
    }
    if fp8_names:
        stream = gather_hf_tensors(
            params, fp8_names, hf, groups, dtype=first.dtype, device=first.device, bucket_bytes=bucket_bytes
        )
        for name, tensor in stream:
            blocks = quantize(tensor)
            result[name], result[name + SCALE_SUFFIX] = digest(blocks.weight_OI), digest(blocks.scale_inv)
    return result
