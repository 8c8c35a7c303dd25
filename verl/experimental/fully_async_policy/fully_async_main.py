"""Upstream's program of the asynchronous schedule: ``main_ppo`` with its config."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(config_name="fully_async_ppo_trainer"))
