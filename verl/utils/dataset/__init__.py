"""Prompts from parquet files."""

from verl.utils.dataset.loader import ResumableLoader
from verl.utils.dataset.prompt_items import PromptItems
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn

__all__ = ["PromptItems", "RLHFDataset", "ResumableLoader", "collate_fn"]
