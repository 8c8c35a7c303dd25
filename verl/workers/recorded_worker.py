"""The worker of a run that trains from records: it has the actor and the reference, and no rollout engine."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.phases import watched
from verl.workers.row_store import RowStore

_RECORDED = "recorded"


class RecordedRowsWorker(ActorRolloutRefWorker):
    """Takes rows that an earlier run has generated as if it had generated them."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_RECORDED))
    @watched
    def take_rows(self, rows: DataProto) -> DataProto:
        """Keeps a share of the next step's rows, and gives references back; those of the step before are freed."""
        self._offload_for_rollout()
        return self.row_store.store_generated(rows, replica_size=1)

    def _build_rollout(self) -> None:
        self._register_dispatch_collect_info(_RECORDED, self.rank, True)
        self.row_store = RowStore(self.groups.world, self.device, self.config.nccl_timeout)
