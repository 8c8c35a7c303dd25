"""Config of the correction between the policy that sampled and the one that is trained."""

from __future__ import annotations

from dataclasses import dataclass

LEVELS = ("token", "sequence", "geometric")


@dataclass(frozen=True)
class RolloutCorrectionConfig:
    """Importance sampling and rejection by exp(old_log_prob - rollout_log_prob).

    Attributes:
        rollout_is: level of the importance weights: ``token``, ``sequence`` (the product of its tokens' ratios) or
            ``geometric`` (their geometric mean); absent means no weights.
        rollout_is_threshold: upper bound of the weights; larger ones are cut to it.
        rollout_rs: level at which tokens or sequences outside of [lower, upper] are rejected, that is left out of the
            loss; absent means that none is.
        rollout_rs_threshold: the upper bound of rejection; absent means ``rollout_is_threshold``.
        rollout_rs_threshold_lower: the lower bound of rejection; absent means 1 / upper, 0 means no lower bound.
        rollout_token_veto_threshold: reject a whole sequence if the ratio of one of its tokens is below this; absent
            means never.
        bypass_mode: use the rollout's log-probs as the old ones, so that no pass computes others.
        rollout_is_batch_normalize: divide the weights by their mean over the batch.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    rollout_rs: str | None = None
    rollout_rs_threshold: float | None = None
    rollout_rs_threshold_lower: float | None = None
    rollout_token_veto_threshold: float | None = None
    bypass_mode: bool = False
    rollout_is_batch_normalize: bool = False

    @property
    def is_on(self) -> bool:
        """Whether any sample is weighted or rejected."""
        return bool(self.rollout_is or self.rollout_rs or self.rollout_token_veto_threshold is not None)

    @property
    def needs_rollout_log_probs(self) -> bool:
        """Whether the rollout must report the log-probs of its tokens."""
        return self.is_on or self.bypass_mode

    @property
    def rs_upper(self) -> float:
        """Ratios above are rejected."""
        return self.rollout_is_threshold if self.rollout_rs_threshold is None else self.rollout_rs_threshold

    @property
    def rs_lower(self) -> float:
        """Ratios below are rejected."""
        return 1.0 / self.rs_upper if self.rollout_rs_threshold_lower is None else self.rollout_rs_threshold_lower

    def problems(self, where: str) -> list[str]:
        """Every value that cannot work, one sentence each."""
        found = []
        for key, level in (("rollout_is", self.rollout_is), ("rollout_rs", self.rollout_rs)):
            if level is not None and level not in LEVELS:
                found.append(f"{where}.{key} is {level!r}; expected one of {', '.join(LEVELS)}, or leave it out")
        limits = (
            ("rollout_is_threshold", self.rollout_is_threshold),
            ("rollout_rs_threshold", self.rollout_rs_threshold),
        )
        bad = [
            f"{where}.{key} is {limit}; it must be above 0" for key, limit in limits if limit is not None and limit <= 0
        ]
        if bad:
            return found + bad
        if self.rs_lower < 0 or self.rs_lower > self.rs_upper:
            found.append(
                f"{where}.rollout_rs_threshold_lower is {self.rs_lower:g}; it must lie between 0 (no lower bound) and "
                f"the upper threshold {self.rs_upper:g}"
            )
        veto = self.rollout_token_veto_threshold
        if veto is not None and not 0 < veto < 1:
            found.append(f"{where}.rollout_token_veto_threshold is {veto}; expected above 0 and below 1, as 1e-4")
        if self.rollout_is_batch_normalize and self.rollout_is is None:
            found.append(f"{where}.rollout_is_batch_normalize is True, but {where}.rollout_is is empty: no weights")
        if self.bypass_mode and self.is_on:
            found.append(
                f"{where}.bypass_mode is True, so old and rollout log-probs are the same and every ratio is 1; take "
                "out rollout_is, rollout_rs and rollout_token_veto_threshold, or set bypass_mode=False"
            )
        return found
