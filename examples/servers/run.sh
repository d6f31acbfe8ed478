#!/usr/bin/env bash
# run.sh BF16_RESULT NVFP4_RESULT OUT
set -euo pipefail
qad measure import "$1" --arm bf16 --out "$3/bf16.json"
qad measure import "$2" --arm ptq --out "$3/ptq.json"
qad compare "$3/bf16.json" "$3/ptq.json" --out "$3/comparison"
