#!/bin/sh
# Decode speed of the presets at three depths, with random weights: benchmarks/decode.sh RESULTS.jsonl
set -eu
results=${1:?usage: benchmarks/decode.sh RESULTS.jsonl}
for model in llama-3.2-1b llama-3.1-8b; do
    cheetah bench "random:$model" --contexts 128,1024,6144 --steps 64 --repetitions 5 --json "$results"
done
