"""A pass over the tokens of prompts: products of packed weights with many vectors at a time, on `wgmma`."""
