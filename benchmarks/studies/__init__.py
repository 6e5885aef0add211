"""The studies of FlashFormer's paper on our building blocks: python -m benchmarks.studies linear|stacks|model|ring|all

Each study is a module: what its kernels are, how their results are checked on the device, what is timed. A study gives
records (one JSON line a measurement); `report` makes the tables of them.
"""
