#!/usr/bin/env bash
# run.sh RESULTS [ARM]; exit code 0 pass, 1 fail, 3 undecided
set -euo pipefail
here=$(dirname "$0")
qad gate "$1" --policy "$here/policy.yaml" ${2:+--arm "$2"} --json
