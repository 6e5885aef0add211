"""Filters of what may be sampled: top-k, top-p and min-p, found by all blocks together."""
