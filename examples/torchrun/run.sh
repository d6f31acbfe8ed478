#!/usr/bin/env bash
# run.sh RANKS RECIPE OUT [--set KEY=VALUE ...]
set -euo pipefail
torchrun --standalone --nproc-per-node "$1" -m qad run "$2" --out "$3" "${@:4}"
