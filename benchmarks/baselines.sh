#!/bin/sh
# Other systems beside ours on one GPU: benchmarks/baselines.sh RESULTS.jsonl [FOLDER OF A CLONE OF gpt-fast]
# 5 minutes for those of compare.py, whatever is late is left out; then gpt-fast, if its folder is named: compiling both
# contexts is stopped after 4 minutes. Needs torch, and transformers for the system of that name.
set -eu
results=${1:?usage: benchmarks/baselines.sh RESULTS.jsonl [GPT_FAST_FOLDER]}
python=${PYTHON:-python}
echo "baselines: about 5 minutes, with gpt-fast at most 5 more; records go to $results" >&2
status=0
"$python" benchmarks/compare.py --json "$results" --budget-s 240 || status=1
if [ -n "${2:-}" ]; then
    "$python" -m benchmarks.baselines gpt-fast random:llama-3.1-8b --gpt-fast "$2" --contexts 128,1024 \
        --json "$results" || status=1
fi
exit $status
