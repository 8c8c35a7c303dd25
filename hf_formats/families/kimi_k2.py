"""Kimi-K2: DeepSeek-V3's form with 384 experts in one group and half as many heads."""

from __future__ import annotations

from dataclasses import replace

from hf_formats.families import deepseek

FAMILY = replace(deepseek.V3, model_type="kimi_k2")
