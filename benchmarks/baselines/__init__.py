"""Decode steps of Llama models by public libraries, measured as `cheetah bench` measures: what ours is compared with.

    python -m benchmarks.baselines plain random:llama-3.2-1b --contexts 128,6144 --json results.jsonl

It needs torch, and `transformers` for the system of that name. `benchmarks/compare.py` runs them beside ours.
"""
