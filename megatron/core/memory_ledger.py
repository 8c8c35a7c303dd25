"""Lists every persistent byte that a training engine holds on one rank, by owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.offload import HostTensor, OffloadableTensor
from megatron.core.distributed.param_and_grad_buffer import Range
from megatron.core.optimizer import DistributedOptimizer

ON_DEVICE, ON_HOST = "device", "host"


@dataclass(frozen=True)
class LedgerEntry:
    """The bytes that one owner holds in one kind of memory.

    Attributes:
        owner: the name of a parameter or buffer, or of the flat buffer whose padding this is.
        what: parameter, gradient, buffer, master, exp_avg, exp_avg_sq, slots (through which CPU Adam copies), or
            communicator (of a group, with its buffers);
            "... copy" is what an offload keeps on the host.
        device: "device" or "host".
        num_bytes: the size.
    """

    owner: str
    what: str
    device: str
    num_bytes: int


def ledger(model: nn.Module, optimizer: DistributedOptimizer | None = None) -> list[LedgerEntry]:
    """Return all memory that ``model`` (wrapped or not) and ``optimizer`` hold between steps, as it is now.

    Offloaded tensors count on the host. Tied weights count once, under their first name.
    """
    entries: list[LedgerEntry] = []
    module, seen = model, set()
    if isinstance(model, DistributedDataParallel):
        for buffer in model.param_and_grad_buffers:
            entries += _flat_entries(buffer.params, "parameter", buffer.name, buffer.param_ranges)
            entries += _flat_entries(buffer.grads, "gradient", buffer.name, buffer.param_ranges)
        for frozen in model.frozen_params:
            entries += _flat_entries(frozen.params, "parameter", frozen.name, frozen.param_ranges)
        module = model.module
        seen = {_storage(param) for param in module.parameters()}
    for what, tensors in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in tensors:
            if _storage(tensor) not in seen:
                seen.add(_storage(tensor))
                entries.append(LedgerEntry(name, what, ON_DEVICE, tensor.untyped_storage().nbytes()))
    if optimizer is not None:
        for state in optimizer.shards:
            first = state.buffer.shard[0] + state.start
            for what, item in state.tensors.items():
                entries += _flat_entries(item, what, state.buffer.name, state.buffer.param_ranges, first)
        entries += [
            LedgerEntry(name, "slots", ON_HOST, slots.host_bytes) for name, slots in optimizer.host_slots.items()
        ]
    return entries


def communicator_entries(buffer_bytes: Mapping[str, int]) -> list[LedgerEntry]:
    """Return the entries of communicators, group -> bytes; torch's allocator knows nothing of them."""
    return [
        LedgerEntry(f"group {name}", "communicator", ON_DEVICE, size) for name, size in buffer_bytes.items() if size
    ]


def total_bytes(entries: Sequence[LedgerEntry], device: str | None = None, what: str | None = None) -> int:
    """Return the sum over the entries of one device (None: all) and one kind (None: all)."""
    return sum(
        entry.num_bytes
        for entry in entries
        if (device is None or entry.device == device) and (what is None or entry.what == what)
    )


def table(entries: Sequence[LedgerEntry], depth: int = 3) -> str:
    """Return lines of "bytes device what owner", largest first; owner names are cut after ``depth`` parts."""
    sums: dict[tuple[str, str, str], int] = {}
    for entry in entries:
        key = (entry.device, entry.what, ".".join(entry.owner.split(".")[:depth]))
        sums[key] = sums.get(key, 0) + entry.num_bytes
    lines = [f"{size:>16,} {place:6} {what:18} {owner}" for (place, what, owner), size in sums.items()]
    return "\n".join([*sorted(lines, reverse=True), f"{total_bytes(entries):>16,} in all"])


def _flat_entries(
    item: OffloadableTensor, what: str, name: str, ranges: Mapping[str, Range], first: int = 0
) -> Iterator[LedgerEntry]:
    """Yield the entries of a flat tensor by parameter: it holds ``ranges`` from element ``first`` on, then padding."""
    on_host = what if isinstance(item, HostTensor) else f"{what} copy"
    places = ((ON_DEVICE, what, item.device_bytes), (ON_HOST, on_host, item.host_bytes))
    itemsize, numel = item.tensor.element_size(), item.tensor.numel()
    for place, kind, num_bytes in places:
        if not num_bytes:
            continue
        for owner, (start, stop) in ranges.items():
            low, high = max(start - first, 0), min(stop - first, numel)
            if low < high:
                num_bytes -= (high - low) * itemsize
                yield LedgerEntry(owner, kind, place, (high - low) * itemsize)
        if num_bytes:
            yield LedgerEntry(f"{name} (padding)", kind, place, num_bytes)


def _storage(tensor: Tensor) -> int:
    """Return a key for the storage of ``tensor``; a storage without memory (offloaded, meta) has one too."""
    return int(tensor.untyped_storage()._cdata)
