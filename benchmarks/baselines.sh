#!/bin/sh
# Other systems beside ours on one GPU: benchmarks/baselines.sh RESULTS.jsonl [FOLDER OF A CLONE OF gpt-fast]
# 5 minutes for those of compare.py, whatever is late is left out; then gpt-fast, if its folder is named, in bf16 and in 4
# bits: compiling is stopped after 4 minutes each. Needs torch, and transformers for the system of that name.
set -eu
results=${1:?usage: benchmarks/baselines.sh RESULTS.jsonl [GPT_FAST_FOLDER]}
python=${PYTHON:-python}
echo "baselines: about 5 minutes, with gpt-fast at most 10 more; records go to $results" >&2
status=0
"$python" benchmarks/compare.py --json "$results" --budget-s 240 || status=1
if [ -n "${2:-}" ]; then
    for model in llama-3.1-8b llama-3.1-8b@int4-g128; do
        "$python" -m benchmarks.baselines gpt-fast "random:$model" --gpt-fast "$2" --contexts 128,1024 \
            --json "$results" || status=1
    done
fi
exit $status
