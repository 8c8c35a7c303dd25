"""Upstream's program of the schedule one_step_off: ``main_ppo`` with its config."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main(config_name="one_step_off_ppo_trainer"))
