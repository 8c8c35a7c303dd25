"""Names in the config of what is registered, by us or by the user's own modules."""

from __future__ import annotations

from collections.abc import Iterator

from verl.trainer.config.config import PPOTrainerConfig
from verl.utils.import_utils import import_external_libs


def registry_problems(config: PPOTrainerConfig) -> Iterator[str]:
    """Every name that nothing is registered under, after the import of ``actor_rollout_ref.model.external_lib``.

    The registries are imported here because their entries need torch, which importing the config must not.
    """
    from verl.trainer.ppo.algos import ESTIMATORS
    from verl.trainer.ppo.policy_losses import LOSSES
    from verl.workers.reward_manager import MANAGERS

    models = config.actor_rollout_ref
    try:
        import_external_libs(models.model.external_lib)
    except Exception as error:  # a process edge: the user's code runs here, and may raise anything
        yield f"actor_rollout_ref.model.external_lib is {models.model.external_lib!r}: {type(error).__name__}: {error}"
    for registry, name in (
        (ESTIMATORS, config.algorithm.adv_estimator),
        (LOSSES, models.actor.policy_loss.loss_mode),
        (MANAGERS, config.reward_model.reward_manager),
    ):
        if name not in registry.names:
            yield (
                f"{registry.key} is {name!r}; expected one of {', '.join(registry.names)}, or a name that a module of "
                "actor_rollout_ref.model.external_lib registers"
            )
