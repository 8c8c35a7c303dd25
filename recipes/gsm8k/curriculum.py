"""The order of problems by degree: from the lowest on, to the next when the policy solves those of the last steps."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from typing import Any

from verl.experimental.dataset.sampler import AbstractCurriculumSampler
from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class DegreeCurriculum(AbstractCurriculumSampler):
    """Draws problems of one degree, in an order that follows from the seed, and never goes back.

    It moves to the next degree when the mean score of ``num_steps`` steps in a row, all of the present degree, is above
    ``threshold``; both are set in ``data.sampler.kwargs``.

    Args:
        data_source: rows that name their degree in ``extra_info.degree``.
        threshold: a score from 0 to 1.

    Raises:
        ValueError: a row has no degree, or a setting is out of range.
    """

    def __init__(self, data_source: Any, data_config: Any, threshold: float = 0.95, num_steps: int = 5) -> None:
        if not (isinstance(num_steps, int) and num_steps >= 1 and 0 <= threshold <= 1):
            raise ValueError(
                f"data.sampler.kwargs has threshold {threshold} and num_steps {num_steps}; expected a score from 0 to "
                "1 and a whole number of at least 1"
            )
        self.threshold, self.num_steps = threshold, num_steps
        self.seed, self.num_rows = data_config.seed or 0, len(data_source)
        self.rows: dict[int, list[int]] = {}
        for index in range(self.num_rows):
            degree = (data_source[index].get("extra_info") or {}).get("degree")
            if degree is None:
                raise ValueError(f"row {index} has no extra_info.degree, which {type(self).__name__} goes by")
            self.rows.setdefault(int(degree), []).append(index)
        self.degree, self.num_drawn = min(self.rows), 0
        self.scores: list[float] = []
        self._order: tuple[tuple[int, int], list[int]] | None = None  # degree and round, and the rows of that round

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[int]:
        """Row numbers without end: an epoch stops nowhere."""
        while True:
            rows = self.rows[self.degree]
            which, place = (self.degree, self.num_drawn // len(rows)), self.num_drawn % len(rows)
            if self._order is None or self._order[0] != which:
                generator = random.Random(f"{self.seed} {which}")
                self._order = (which, generator.sample(rows, len(rows)))
            self.num_drawn += 1
            yield self._order[1][place]

    def update(self, batch: DataProto) -> dict[str, float]:
        """Count the step's mean score and move if the last ones allow it; returns the degree that the step trained.

        Where a filter leaves out groups that are all right, the score is that of all groups.
        """
        trained, higher = self.degree, [degree for degree in self.rows if degree > self.degree]
        kept = float(batch.batch["token_level_scores"].sum(-1).mean())
        score = batch.meta_info.get("train/reward_before_filter", kept)
        self.scores = [*self.scores, score][-self.num_steps :]
        mean = sum(self.scores) / len(self.scores)
        if higher and len(self.scores) == self.num_steps and mean > self.threshold:
            self.degree, self.num_drawn, self.scores = min(higher), 0, []
            logger.info(
                "curriculum: the mean score of %d steps is %.3f, above %g: from degree %d to %d",
                *(self.num_steps, mean, self.threshold, trained, self.degree),
            )
        return {"curriculum/degree": float(trained)}

    def state_dict(self) -> dict[str, Any]:
        return {"degree": self.degree, "num_drawn": self.num_drawn, "scores": self.scores}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.degree, self.num_drawn, self.scores = state["degree"], state["num_drawn"], list(state["scores"])
