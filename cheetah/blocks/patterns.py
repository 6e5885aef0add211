"""Patterns of bits that several blocks use, under their names in the text."""

from cheetah import lang as ch

LOW_HALVES, HIGH_HALVES = ch.bits("LOW_HALVES", 0x5410), ch.bits("HIGH_HALVES", 0x7632)
"""What `byte_permute` makes of two words: the pair of their low halves, or of their high ones."""
