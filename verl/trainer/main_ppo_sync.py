"""Upstream's name of the synchronous program, which is ``main_ppo``."""

import sys

from verl.trainer.main_ppo import main

if __name__ == "__main__":
    sys.exit(main())
