"""Router replay: the experts of each token are traced in one pass and replayed in another.

Policy updates on a mixture of experts are steadier when the update routes a token as the pass did that made its
log-probabilities: the rollout (R3, arXiv 2510.11370) or the old log-prob pass (R2, arXiv 2507.18071 "routing replay").
Letters: T tokens of a micro-batch that this rank is given (before the sequence-parallel split), K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron.core.parallel_state import ProcessGroups
from megatron.core.tensor_parallel import collectives
from megatron.core.utils import async_h2d


class MicroBatchRouting:
    """The choices of one micro-batch in every MoE layer of this rank; travels in ``PackedSeqParams.routing``.

    A layer that runs again for the same micro-batch (recompute) gets the choice of its first run, whatever its gate
    computes then. Use one object for one micro-batch and one forward pass. Made by ``RouterReplay``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        rows: Callable[[Tensor], Tensor],
        given: Mapping[int, Tensor] | None = None,
        is_known_T: Tensor | None = None,
    ) -> None:
        self._dtype, self._rows = dtype, rows
        self._given, self._is_known_T = given, is_known_T
        self._made: dict[int, Tensor] = {}

    @property
    def choices(self) -> dict[int, Tensor]:
        """Experts by global layer, compact, [T/TP, K] of this rank's sequence shard; of the layers that have run."""
        return dict(self._made)

    def choose(self, global_layer: int, pick: Callable[[], Tensor]) -> Tensor:
        """Experts int64 [T/TP, K] of one layer; ``pick`` gives the gate's own and is called only where they count."""
        if global_layer in self._made:
            return self._made[global_layer].long()
        if self._given is None:
            chosen_TK = pick()
        elif global_layer not in self._given:
            layers = ", ".join(map(str, sorted(self._given))) or "none"
            raise ValueError(f"router replay has no choices for layer {global_layer}; it has those of layers {layers}")
        elif self._is_known_T is None:
            chosen_TK = self._rows(self._given[global_layer]).long()
        else:
            own_TK = pick()
            given_TK = async_h2d(self._rows(self._given[global_layer]), own_TK.device).to(own_TK.dtype)
            is_known_T = async_h2d(self._rows(self._is_known_T), own_TK.device)
            chosen_TK = torch.where(is_known_T.unsqueeze(1), given_TK, own_TK)
        self._made[global_layer] = chosen_TK.to(self._dtype)
        return chosen_TK


class RouterReplay:
    """Makes the routing of micro-batches: ``PackedSeqParams(..., routing=replay.record())``, or ``replay(choices)``.

    The weights of replayed experts are those of the current gate, normalised over them as usual, with its gradient.
    Choices are kept as uint8 for up to 256 experts, int32 beyond, by global layer (a pipeline stage has its own).
    """

    def __init__(self, num_experts: int, groups: ProcessGroups) -> None:
        self.num_experts = num_experts
        self.dtype = torch.uint8 if num_experts <= 256 else torch.int32
        self._groups = groups

    def record(self) -> MicroBatchRouting:
        """Every router chooses for itself; see ``choices`` for what it chose."""
        return MicroBatchRouting(self.dtype, self._rows)

    def replay(self, choices: Mapping[int, Tensor], is_known_T: Tensor | None = None) -> MicroBatchRouting:
        """Every router takes ``choices[global_layer]`` [T, K] (any integer dtype; host or device).

        Tokens with ``is_known_T`` False (bool [T]; None: all are known) are routed by the gate: padding, or the last
        token of a rollout, which was never an input. Raises ``ValueError`` for experts that do not exist.
        """
        for layer, chosen_TK in choices.items():
            known_TK = chosen_TK if is_known_T is None else chosen_TK[is_known_T.to(chosen_TK.device)]
            low, high = (int(bound) for bound in known_TK.aminmax()) if known_TK.numel() else (0, 0)
            if low < 0 or high >= self.num_experts:
                raise ValueError(
                    f"router replay of layer {layer} has experts {low}..{high}; the model has 0..{self.num_experts - 1}"
                )
        return MicroBatchRouting(self.dtype, self._rows, choices, is_known_T)

    def choices(self, routing: MicroBatchRouting) -> dict[int, Tensor]:
        """What ``routing`` recorded, [T, K] in the order of this rank's tokens; collective over tp."""
        group = self._groups.tp
        mine = routing.choices
        return {layer: collectives.all_gather(mine[layer], group)[0] for layer in sorted(mine)}

    def _rows(self, x_T: Tensor) -> Tensor:
        """This TP rank's part of what is given for all T tokens."""
        rows, rest = divmod(x_T.shape[0], self._groups.tp.size())
        assert rest == 0, f"{x_T.shape[0]} tokens do not divide over {self._groups.tp.size()} TP ranks"
        return x_T[self._groups.tp.rank() * rows : (self._groups.tp.rank() + 1) * rows]
