#!/bin/sh
# Every study on the GPU, and its tables: benchmarks/studies.sh RESULTS.jsonl [DEVICE]
# At most 7 minutes: each of the four studies is stopped after 100 s. DEVICE: cuda, cuda:1, or emulator (small sizes).
set -eu
results=${1:?usage: benchmarks/studies.sh RESULTS.jsonl [DEVICE]}
device=${2:-cuda}
repetitions=20
[ "$device" != emulator ] || repetitions=1
echo "studies on $device: at most 7 minutes; records go to $results" >&2
exec "${PYTHON:-python}" -m benchmarks.studies all --device "$device" --repetitions "$repetitions" --json "$results"
