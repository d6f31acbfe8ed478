#!/usr/bin/env bash
# run.sh OUT
set -euo pipefail
here=$(dirname "$0")
qad compare "$here/published.csv" --out "$1" --policy drop-1pct
qad gate "$1" --policy drop-1pct
