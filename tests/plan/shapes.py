"""Sizes of published models and of a tiny one whose sizes divide nothing."""

from cheetah.plan import ModelShape

LLAMA_1B = ModelShape(hidden=2048, ffn=8192, vocab=128256, heads=32, kv_heads=8, head_dim=64, layers=16)
LLAMA_3B = ModelShape(hidden=3072, ffn=8192, vocab=128256, heads=24, kv_heads=8, head_dim=128, layers=28)
LLAMA_8B = ModelShape(hidden=4096, ffn=14336, vocab=128256, heads=32, kv_heads=8, head_dim=128, layers=32)
LLAMA_70B = ModelShape(hidden=8192, ffn=28672, vocab=128256, heads=64, kv_heads=8, head_dim=128, layers=80)
TINY = ModelShape(hidden=200, ffn=508, vocab=1003, heads=3, kv_heads=1, head_dim=64, layers=4)
