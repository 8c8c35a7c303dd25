"""One weight from its trainer to a rollout engine, hop by hop, as docs/life_of_a_step.md shows it.

Eight ranks train and a ninth generates. The hops are read off real syncs, and so are the classes that know the weight.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_formats.config import load_hf_config
from hf_formats.fp8 import SCALE_SUFFIX
from hf_formats.ranges import Ranges
from megatron.core.parallel_layout import ParallelLayout
from mindspeed_llm.weight_source import hf_view
from tests.mindspeed_llm.tiny import tiny_hf_config, write_tiny_checkpoint
from tests.pages import ROOT
from tests.parallel.launcher import run_ranks
from tests.verl.test_weight_sync import params_of
from verl.workers.config import RolloutConfig
from verl.workers.rollout.vllm_rollout.vllm_rollout_spmd import all_rank_shards, vLLMRollout
from verl.workers.weight_sync.plan import build_plan
from verl.workers.weight_sync.sync import WeightSync
from verl.workers.weight_sync.trained_weights import trained_values
from vllm.model_executor.model_loader.shard_writer import ShardWriter

NAME = "model.layers.5.mlp.experts.17.gate_proj.weight"
PARAM = "decoder.layers.2.mlp.experts.weight1"
CONFIG = tiny_hf_config(num_hidden_layers=6, n_routed_experts=20)
LAYOUT = ParallelLayout(8, 1, 2, expert_model_parallel_size=4)
SENDER, RECEIVER = 7, 8
BUCKET = 512 << 10
MOST_CLASSES = 7
# What runs the sync, or owns a whole engine and with it every weight.
DOERS = {"WeightSync", "vLLMRollout", "LLM", "EngineCore", "Worker", "WeightMemory"}
OURS = ("hf_formats", "megatron", "mindspeed", "mindspeed_llm", "verl", "vllm")
PAGE = (ROOT / "docs" / "life_of_a_step.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("\n### One weight, hop by hop\n")[2].partition("\n## ")[0]


class Way:
    """The classes of ours of which functions of ours were given, or returned, an instance that knows the weight.

    An instance knows it whose fields, in containers or in instances of ours too, have one of its names or its memory;
    and so does what such an instance has in its fields. A dict or a tuple counts where it is a record: more than two
    fields, of several types.
    """

    def __init__(self, names: set[str], memory: Tensor) -> None:
        self.classes: set[str] = set()
        self._names, self._memory = names, memory.untyped_storage().data_ptr()

    def hook(self, frame: FrameType, event: str, value: Any) -> None:
        """For ``sys.setprofile``."""
        if event not in ("call", "return") or not _is_of_ours(str(frame.f_globals.get("__name__"))):
            return
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = [frame.f_locals[name] for name in names if name in frame.f_locals] if event == "call" else [value]
        for one in values:
            self._look(one)

    def _look(self, value: Any) -> None:
        kind = type(value)
        if kind in (list, tuple, dict):
            items = list(value.values()) if kind is dict else value
            is_record = kind is not list and len(items) > 2 and len(set(map(type, items))) > 1
            if is_record and self._is_known(value):
                self.classes.add(kind.__name__)
            for item in items:
                self._look(item)
        elif _is_instance_of_ours(value) and kind.__name__ not in self.classes and self._is_known(value):
            self.classes.add(kind.__name__)
            if kind.__name__ not in DOERS:
                self.classes |= {type(part).__name__ for part in _fields(value) if _is_instance_of_ours(part)}

    def _is_known(self, value: Any, met: set[int] | None = None) -> bool:
        if isinstance(value, str):
            return value in self._names
        if isinstance(value, Tensor):
            return value.untyped_storage().data_ptr() == self._memory
        met = set() if met is None else met
        if isinstance(value, dict):
            inner: Iterable[Any] = [*value, *value.values()]
        elif isinstance(value, (list, set)) or type(value) is tuple:
            inner = value
        elif _is_instance_of_ours(value) and id(value) not in met:
            inner = _fields(value)
        else:
            return False
        met.add(id(value))
        return any(self._is_known(one, met) for one in inner)


def _is_of_ours(module: str) -> bool:
    return module.partition(".")[0] in OURS


def _is_instance_of_ours(value: Any) -> bool:
    return _is_of_ours(type(value).__module__) and not isinstance(value, (type, nn.Module))


def _fields(value: Any) -> list[Any]:
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ()) if isinstance(name, str)]
    return [*(value if isinstance(value, tuple) else ()), *slots, *getattr(value, "__dict__", {}).values()]


@contextmanager
def watched(way: Way, seen: dict[str, str]) -> Iterator[None]:
    """Trace the rounds of a sync, and note what is read of each training weight and what is written to the engine."""

    def hook(frame: FrameType, event: str, value: Any) -> None:
        way.hook(frame, event, value)
        if event == "return" and frame.f_code is trained_values.__code__:
            seen[frame.f_locals["transfer"].hf_name] = described(value)
        if event == "return" and frame.f_code is ShardWriter.write.__code__:
            seen[frame.f_locals["hf_name"]] = described(frame.f_locals["target"])
        if event == "return" and frame.f_code is WeightSync._run_rounds.__code__:
            sys.setprofile(None)

    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}, {tensor.nbytes} bytes"


def indexed(ranges: Ranges) -> str:
    return str([f"{a}:{b}" if b - a > 1 else str(a) for a, b in ranges]).replace("'", "")


def one_sync(path: str, quantization: str | None) -> dict[str, Any]:
    """What this rank has seen of the weight."""
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    settings: dict[str, Any] = {"max_num_seqs": 4, "num_gpu_blocks_override": 16, "enforce_eager": True}
    settings |= {"prompt_length": 16, "response_length": 16, "dtype": "bfloat16", "quantization": quantization}
    config, device = RolloutConfig(**settings), torch.device("cpu")
    shards = {RECEIVER: all_rank_shards(config, path, 1)[0]}
    sizes = {"bucket_bytes": BUCKET, "ranks_per_node": group.size()}
    plan = build_plan(load_hf_config(path), LAYOUT, torch.bfloat16, shards, group.size(), **sizes)
    sync = WeightSync(plan, shards.get(rank, {}), group, device)
    params = params_of(path, LAYOUT, rank, torch.bfloat16)
    rollout, views, names = None, {}, {}
    if rank == RECEIVER:
        ops = "vllm.ops.reference:rollout_ops"
        rollout = vLLMRollout(config, path, rollout_ops=ops, device=device, first_rank=RECEIVER)
        rollout.resume(["weights"])
        model = rollout.inference_engine.core.worker.model
        views, names = model.weight_views, {id(parameter): name for name, parameter in model.named_parameters()}
    elif rank != SENDER:
        sync.run(params, None, version=1)
        return {}
    memory = views[NAME].parameter if rank == RECEIVER else params[PARAM]
    way, seen = Way({NAME, NAME + SCALE_SUFFIX, PARAM}, memory), dict[str, str]()
    with watched(way, seen):
        sync.run(params, rollout, version=1)
    ((number, round_, transfer, offset),) = (
        (number, round_, transfer, offset)
        for number, round_ in enumerate(sync.rounds, 1)
        for transfer, offset in (*round_.sent, *round_.received)
        if transfer.hf_name == NAME
    )
    shard, peer = transfer.shard, SENDER + RECEIVER - rank
    message = round_.sent_bytes[peer] if rank == SENDER else round_.received_bytes[peer]
    return {
        "classes": way.classes,
        "part": (views[NAME].read() if rank == RECEIVER else hf_view(memory, shard)).float(),
        "trained": f"`{shard.param}{indexed(shard.local_ranges)}` of {list(memory.shape)}",
        "stored": f"`{names.get(id(memory))}[17, 0:32]` of {list(memory.shape)}",
        "values": " and ".join(seen[name] for name in (NAME, NAME + SCALE_SUFFIX) if name in seen),
        "ranges": indexed(transfer.ranges),
        "transfer": f"from {transfer.pairs.sources_D.tolist()} to {transfer.pairs.destinations_D.tolist()}",
        "round": f"{number} of {plan.num_rounds}, {message} bytes",
        "bucket": f"at byte {offset} of {sum(round_.sent_bytes) + sum(round_.received_bytes)}",
    }


def both_syncs(path: str) -> list[dict[str, Any]]:
    return [one_sync(path, quantization) for quantization in (None, "fp8")]


def named_after(words: str) -> set[str]:
    """The names of code in the page's section from these words to the end of the sentence."""
    return set(re.findall(r"`(\w+)`", SECTION.partition(words)[2].partition(".")[0]))


def test_one_weight_hop_by_hop(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, CONFIG, seed=1, dtype=torch.float32)
    coords = LAYOUT.coords(SENDER)
    assert (coords.pp, coords.ep) == (1, 3)
    ranks = run_ranks(both_syncs, LAYOUT.world_size + 1, str(tmp_path))
    senders, receivers = ranks[SENDER], ranks[RECEIVER]
    sender, receiver = senders[0], receivers[0]
    assert torch.equal(sender["part"], receiver["part"])
    rows = [
        f"| training parameter | {sender['trained']} | {described(sender['part'].bfloat16())} | the same |",
        f"| `trained_values` | `{NAME}{sender['ranges']}` | {' | '.join(one['values'] for one in senders)} |",
        f"| `Transfer` | ranks | {' | '.join(one['transfer'] for one in senders)} |",
        f"| bucket | rank {SENDER} | {' | '.join(one['bucket'] for one in senders)} |",
        f"| `Round`, `all_to_all` | {SENDER} to {RECEIVER} | {' | '.join(one['round'] for one in senders)} |",
        f"| bucket | rank {RECEIVER} | {' | '.join(one['bucket'] for one in receivers)} |",
        f"| `ShardWriter.write` | {receiver['stored']} | {' | '.join(one['values'] for one in receivers)} |",
    ]
    table = "\n".join(["| hop | where | bf16 engine | FP8 engine |", "|---|---|---|---|", *rows])
    assert table in SECTION, table
    classes = set[str]().union(*(one["classes"] for one in (*senders, *receivers)))
    assert classes & DOERS == named_after("They are run by")
    assert classes - DOERS == named_after("These classes know the weight") and len(classes - DOERS) <= MOST_CLASSES
