"""The attention core by itself: plan and run over a paged cache, without a model around it."""

from cheetah.attention.batch import AttentionError, BatchAttention, Prefix, nhd_to_hnd

__all__ = ["AttentionError", "BatchAttention", "Prefix", "nhd_to_hnd"]
