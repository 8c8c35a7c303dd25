"""What a sampler of ``data.sampler`` is: an order of the prompts, which may follow what the policy learns."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sized
from typing import Any

from torch.utils.data import Sampler

from verl.protocol import DataProto


class AbstractSampler(Sampler[int]):
    """Yields the indices of an epoch; ``len`` is their number, without it that of the data set's rows.

    A sampler whose order does not follow from its arguments has ``state_dict`` (as JSON) and ``load_state_dict``, after
    which ``iter`` continues in the middle of the epoch. Without them a resumed run draws the epochs again.

    Args:
        data_source: the data set.
        data_config: the section ``data`` of the config.
        further ones: ``data.sampler.kwargs``, by name.
    """

    @abstractmethod
    def __init__(self, data_source: Sized, data_config: Any) -> None: ...


class AbstractCurriculumSampler(AbstractSampler):
    """A sampler that sees every step's samples; indices are drawn batch by batch, so it decides the next step's."""

    @abstractmethod
    def update(self, batch: DataProto) -> Mapping[str, float] | None:
        """Called after each step with its samples: ``index``, ``uid``, rewards, advantages and all other columns.

        ``meta_info`` has the metrics of its sampling, with a filter ``train/reward_before_filter``.

        Returns metrics of the step, if any.
        """
