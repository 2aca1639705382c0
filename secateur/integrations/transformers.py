"""For Hugging Face transformers: load and save models with their masks, and evaluate them."""

from __future__ import annotations

from secateur.integrations.evaluation import lm_eval, perplexity
from secateur.integrations.folder import load, save
from secateur.model.mask_files import load_masks

__all__ = ["lm_eval", "load", "load_masks", "perplexity", "save"]
