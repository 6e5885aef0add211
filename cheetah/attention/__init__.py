"""The attention core by itself: plan and run over a paged cache, without a model around it."""

from cheetah.attention.batch import BatchAttention, nhd_to_hnd
from cheetah.attention.errors import AttentionError
from cheetah.attention.requests import Prefix

__all__ = ["AttentionError", "BatchAttention", "Prefix", "nhd_to_hnd"]
