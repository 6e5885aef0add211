"""Attention in the language: the core, its schedule, the states and their merge, the cache, the variants."""
