"""Expert weights as transformers' models hold them since version 5: the experts of a layer in one tensor.

Letters: E experts, H hidden size, I an expert's width.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from vllm.model_executor.model_loader.weight_view import Weight

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


def split_experts(weights: Iterable[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Yield each weight under its name in a checkpoint.

    `gate_up_proj` [E, 2 I, H] holds gate_proj and then up_proj of each expert, `down_proj` is [E, H, I].
    """
    for name, weight in weights:
        if not isinstance(weight, Tensor) or not name.endswith((_GATE_UP, _DOWN)):
            yield name, weight
            continue
        prefix, _, kind = name.rpartition(".")
        for expert, values in enumerate(weight):
            if kind == "down_proj":
                yield f"{prefix}.{expert}.down_proj.weight", values
            else:
                gate, up = values.chunk(2)
                yield f"{prefix}.{expert}.gate_proj.weight", gate
                yield f"{prefix}.{expert}.up_proj.weight", up
