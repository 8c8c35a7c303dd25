"""The worker of a run that trains on saved rollouts: it has the actor and the reference, and no rollout engine."""

from __future__ import annotations

from verl.protocol import DataProto
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.workers.megatron_workers import ActorRolloutRefWorker
from verl.workers.phases import worker_phase
from verl.workers.row_store import RowStore

_SAVED = "saved"


class SavedRolloutWorker(ActorRolloutRefWorker):
    """Takes rows that an earlier run generated as if it had generated them."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name=_SAVED))
    @worker_phase
    def take_rows(self, rows: DataProto) -> DataProto:
        """Stores its share of the next step's rows and returns references; frees those of the step before."""
        self.offload_for_rollout()
        return self.row_store.store_generated(rows, replica_size=1)

    def _build_rollout(self) -> None:
        self._register_dispatch_collect_info(_SAVED, self.rank, True)
        self.row_store = RowStore(self.groups.world, self.device, self.config.nccl_timeout)
