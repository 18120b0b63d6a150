#!/usr/bin/env bash
# Fetch the published SDKs that are judged beside the one in .venv.
#
#   sdks.sh        those that `make test` runs
#   sdks.sh all    every one of docs/reference/compatibility.md
#
# Each goes to a folder of its own in .sdk/, without its dependencies: those of .venv satisfy it, and
# PYTHONPATH puts it first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

sdks=(tinker==0.22.0 mindlab-toolkit==0.2.0)
[ "${1:-}" = all ] && sdks+=(tinker==0.25.0 tinker==0.30.1 tinker==0.33.1)

fetch() {
  local folder=.sdk/${1/==/-}
  [ -f "$folder/.fetched" ] && return
  rm -rf "$folder"
  "${PYTHON:-python}" -m pip install --quiet --no-compile --no-deps --target "$folder" "$1"
  touch "$folder/.fetched"
}

# pip mostly waits for the index.
fetching=()
for sdk in "${sdks[@]}"; do
  fetch "$sdk" &
  fetching+=($!)
done
for each in "${fetching[@]}"; do
  wait "$each"
done
