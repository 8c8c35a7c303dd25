"""Command: the tiny DeepSeek-V3 that this recipe starts from (``recipes.common.base_model`` for any recipe)."""

from __future__ import annotations

import sys

from recipes.common import base_model

if __name__ == "__main__":
    raise SystemExit(base_model.main(["r1_zero", *sys.argv[1:]]))
