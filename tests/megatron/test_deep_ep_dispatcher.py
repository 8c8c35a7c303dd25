"""The flex dispatcher gives what all-to-all gives, forward and backward; DeepEP is its documented form in torch."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import Tensor

from megatron.core.parallel_state import destroy_model_parallel, initialize_model_parallel
from megatron.core.transformer.moe.deep_ep_dispatcher import DeepEPTokenDispatcher
from megatron.core.transformer.moe.expert_load import collect_expert_loads
from tests.deep_ep_form import deep_ep_installed
from tests.megatron.model_helpers import tiny_config
from tests.megatron.moe_helpers import assert_close, make_layer, rows_of_rank, tokens
from tests.parallel.launcher import run_ranks

BF16 = {"params_dtype": torch.bfloat16}
FLEX = BF16 | {"moe_token_dispatcher_type": "flex"}
OVERLAP = {"moe_shared_expert_overlap": True}


def outcomes(sizes: dict[str, int]) -> list[tuple[str, Tensor, Tensor, float]]:
    """(what, found, expected, tolerance) of this rank: by flex, and by all-to-all."""
    groups = initialize_model_parallel(**sizes)
    found = []
    with deep_ep_installed():
        for tolerance, plain, flex in ((1e-5, {}, {}), (2e-2, BF16, FLEX), (2e-2, BF16 | OVERLAP, FLEX | OVERLAP)):
            expected, layer = make_layer(groups, **plain), make_layer(groups, **flex)
            if not flex:  # the library's own dtype is bfloat16
                layer.token_dispatcher = DeepEPTokenDispatcher(8, 64, groups)
            assert isinstance(layer.token_dispatcher, DeepEPTokenDispatcher)
            results = []
            for module in (layer, expected):
                x_TH, weight_TH = (x[rows_of_rank(groups)].to(plain.get("params_dtype")) for x in tokens())
                x_TH.requires_grad_()
                y_TH = module(x_TH)
                (y_TH * weight_TH).sum().backward()
                assert x_TH.grad is not None
                grads = {name: weight.grad for name, weight in module.named_parameters() if weight.grad is not None}
                loads = torch.tensor(collect_expert_loads(module, groups))
                results.append({"y": y_TH.detach(), "grad of x": x_TH.grad, "loads": loads} | grads)
            assert results[0].keys() == results[1].keys()
            found += [(f"{flex} {name}", x, results[1][name], tolerance) for name, x in results[0].items()]
    destroy_model_parallel()
    return found


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"expert_model_parallel_size": 2}, marks=pytest.mark.slow, id="2 ranks"),
        pytest.param({"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}, id="4 ranks, TP2"),
    ],
)
def test_flex_is_all_to_all(sizes: dict[str, int]) -> None:
    for found in run_ranks(outcomes, sizes["expert_model_parallel_size"], sizes, timeout_s=60):
        for what, x, expected, tolerance in found:
            assert_close(x.float(), expected.float(), what, tolerance)


def refusals() -> list[str]:
    messages = []
    for sizes in ({"expert_tensor_parallel_size": 2}, {"expert_model_parallel_size": 2}):
        groups = initialize_model_parallel(**sizes)
        with pytest.raises(ValueError) as error:
            make_layer(groups, **FLEX)
        messages.append(str(error.value))
        destroy_model_parallel()
    return messages


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed here")
def test_what_flex_lacks_is_named() -> None:
    split, missing = run_ranks(refusals, 2)[0]
    assert "with expert_tensor_parallel_size 2" in split
    assert "needs deep_ep, which is not installed: build DeepEP" in missing
    with pytest.raises(ValueError, match="'flex' .* needs params_dtype bfloat16"):
        tiny_config(moe_token_dispatcher_type="flex")
