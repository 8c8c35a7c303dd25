"""The Hugging Face tensors of a GGUF file: under which names it has them, and in which order of rows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from hf_formats.config import HFModelConfig
from mindspeed_llm.gguf_form.file import GGUFFile, library
from mindspeed_llm.hf_shapes import always_fp32, hf_tensors


def tensor_problems(file: GGUFFile, hf: HFModelConfig) -> list[str]:
    """Return a sentence for each tensor that the model needs and the file lacks, has in another shape, or has more."""
    needed: dict[str, tuple[int, ...]] = {}
    for hf_name, names in _names(file, hf).items():
        shape, _ = hf_tensors(hf)[hf_name]
        needed[names[0]] = shape if _expert(hf_name) is None else (hf.n_routed_experts, *shape)
        if len(names) == 2:
            needed[names[0]] = (hf.num_attention_heads, hf.kv_lora_rank, hf.qk_nope_head_dim)
            needed[names[1]] = (hf.num_attention_heads, hf.v_head_dim, hf.kv_lora_rank)
    if hf.rope.rope_type == "llama3":
        needed["rope_freqs.weight"] = (hf.rope_dim // 2,)
    found = [f"{name} is missing" for name in needed if name not in file.tensors]
    for name in file.tensors:
        if name not in needed:
            found.append(f"{name} is not part of the model that the file's keys describe")
        elif file.shape(name) != needed[name]:
            found.append(f"{name} has shape {file.shape(name)}; the file's keys make it {needed[name]}")
    return found


def plain_dtype(file: GGUFFile) -> torch.dtype:
    """Return fp32 for a file that has nothing but fp32, else bf16."""
    return torch.float32 if all(one.tensor_type.name == "F32" for one in file.tensors.values()) else torch.bfloat16


def read_tensors(file: GGUFFile, hf: HFModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor under its Hugging Face name, one at a time: in ``plain_dtype``, the router's bias in fp32."""
    plain = plain_dtype(file)
    for hf_name, names in _names(file, hf).items():
        dtype = torch.float32 if always_fp32(hf_name) else plain
        tensor, *values = (file.read(name, dtype, _expert(hf_name)) for name in names)
        if values:  # they follow each head's keys, which the file holds transposed
            tensor = torch.cat([tensor.transpose(1, 2), *values], dim=1).flatten(0, 1)
        if hf.model_type == "llama" and re.search(r"\.[qk]_proj\.", hf_name):
            tensor = _halves(tensor, hf.head_dim)
        yield hf_name, tensor


def _names(file: GGUFFile, hf: HFModelConfig) -> dict[str, list[str]]:
    """Hugging Face name -> the file's; of ``kv_b_proj`` those of its keys and its values where the file divides it."""
    gguf = library("gguf")
    architecture = gguf.MODEL_ARCH[file.keys["general.architecture"].upper()]
    table = gguf.get_tensor_name_map(architecture, hf.num_hidden_layers)
    found = {}
    for hf_name in hf_tensors(hf):
        general = re.sub(r"\.experts\.\d+\.", ".experts.", hf_name).replace("correction_bias", "correction.bias")
        names = [general, *(general.replace("kv_b_proj", kind) for kind in ("k_b_proj", "v_b_proj"))]
        whole, keys, values = (str(table.get_name(name, try_suffixes=(".weight", ".bias"))) for name in names)
        is_divided = keys != whole and whole not in file.tensors
        found[hf_name] = [keys, values] if is_divided else [whole]
    return found


def _expert(hf_name: str) -> int | None:
    """The place of a tensor in a stack of experts; None where it is in none."""
    match = re.search(r"\.experts\.(\d+)\.", hf_name)
    return int(match[1]) if match else None


def _halves(rows: Tensor, head_dim: int) -> Tensor:
    """A head's channels as two halves that are rotated together, as Hugging Face has Llama's, from neighbours."""
    return rows.view(-1, head_dim // 2, 2, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)
