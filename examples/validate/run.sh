#!/usr/bin/env bash
# run.sh BF16_DIR NVFP4_DIR OUT [options of qad validate]; exit code 0 pass, 1 fail or broken, 3 undecided
set -euo pipefail
qad check "$2"
qad validate bf16="$1" mine="$2" --out "$3" "${@:4}"
