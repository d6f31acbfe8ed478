#!/usr/bin/env bash
# run.sh MODEL DATA OUT [--set KEY=VALUE ...]
set -euo pipefail
model=$1 data=$2 out=$3
[ -f "$out.yaml" ] || qad init --model "$model" --data "$data" --out "$out.yaml"
qad plan "$out.yaml" "${@:4}"
qad run "$out.yaml" --out "$out" "${@:4}"
qad show "$out"
