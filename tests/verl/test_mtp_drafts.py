"""The rollout engine drafts what the prediction layer that is trained predicts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from hf_formats.config import load_hf_config
from megatron.core.ops import reference_ops
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from mindspeed_llm.hf_checkpoint import HFCheckpoint
from mindspeed_llm.load_weights import load_weights
from mindspeed_llm.model import build_model
from mindspeed_llm.weight_plan import local_plan
from tests.megatron.model_helpers import one_process_groups
from tests.vllm.tiny import TINY, write_checkpoint
from vllm import LLM
from vllm.v1.request import Request
from vllm.v1.sample.rng import exponential_noise, position_keys, splitmix64, vocab_keys

VOCAB, PROMPT, SEED = 12, [2, 5, 3], 4


def predictions(path: str, tokens: list[int]) -> list[int]:
    """The token after the next one of each token, drawn from the training engine's prediction with the noise there."""
    with one_process_groups() as groups:
        hf = load_hf_config(path).with_mtp(1)
        model = build_model(hf, groups, reference_ops(), params_dtype=torch.float32)
        load_weights(model, local_plan(hf, groups.layout, groups.rank), HFCheckpoint(path))
        found: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, MultiTokenPredictionLayer):
                module.register_forward_hook(lambda _, __, output: found.append(output))
        ids_T, positions_T = torch.tensor(tokens), torch.arange(len(tokens))
        model(ids_T, positions_T, PackedSeqParams(torch.tensor([0, len(tokens)], dtype=torch.int32), len(tokens)))
        logits_TW = model._logits(found[0]).detach()
    drawn = np.arange(len(tokens)) + 2 - len(PROMPT)
    keys_T2 = torch.from_numpy(position_keys(splitmix64(np.array([SEED], dtype=np.uint64)), drawn[:, None]))
    weights_TW = logits_TW.softmax(-1) / exponential_noise(keys_T2, torch.from_numpy(vocab_keys(VOCAB)))
    return weights_TW.argmax(-1).tolist()


@pytest.mark.parametrize("way", [{}, {"enforce_eager": None}, {"max_num_batched_tokens": 2, "max_num_seqs": 1}])
def test_drafts_are_what_the_training_engine_predicts(tmp_path: Path, way: dict[str, object]) -> None:
    path = write_checkpoint(tmp_path, 3, **TINY | {"vocab_size": VOCAB, "num_nextn_predict_layers": 1})
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "adaptive": False}
    llm = LLM(
        path,
        skip_tokenizer_init=True,
        max_model_len=96,
        block_size=4,
        num_gpu_blocks_override=60,
        speculative_config=drafts,
        rollout_ops="vllm.ops.cpu:default_ops",
        **way,
    )
    request = Request("0", PROMPT, max_tokens=80, seed=SEED)
    llm.engine.run_requests([request])
    tokens = request.token_ids
    predicted = predictions(path, tokens)
    position, verified, right = len(PROMPT) - 1, 0, 0
    while position + 3 < len(tokens):
        is_right = predicted[position] == tokens[position + 2]
        verified, right, position = verified + 1, right + is_right, position + 1 + is_right
    assert llm.core.scheduler.speculation.counts == [verified, verified, right]
    assert right > 3
