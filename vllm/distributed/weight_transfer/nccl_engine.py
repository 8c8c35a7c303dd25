"""What clients import to send weights to a server over NCCL, even if they keep the engine in their own process."""

from __future__ import annotations


class NCCLWeightTransferEngine:
    """Raises ValueError: the server takes no weights."""

    def __init__(self, *settings: object, **options: object) -> None:
        raise ValueError(_MISSING)

    @staticmethod
    def trainer_init(*settings: object, **options: object) -> None:
        raise ValueError(_MISSING)

    @staticmethod
    def trainer_send_weights(*settings: object, **options: object) -> None:
        raise ValueError(_MISSING)


class NCCLTrainerSendWeightsArgs:
    """Raises ValueError: the server takes no weights."""

    def __init__(self, *settings: object, **options: object) -> None:
        raise ValueError(_MISSING)


_MISSING = (
    "sending weights to a server is not supported: keep the engine in the trainer's process (TRL: "
    "vllm_mode='colocate'), or in another one on the same device (backend 'ipc')"
)
