#!/usr/bin/env bash
# Fetch the older official SDK that the conformance tests run beside the one in .venv.
#
# It goes to .sdk/ without its dependencies: those of .venv satisfy it, and PYTHONPATH puts it first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

version=0.22.0
folder=.sdk/tinker-$version

[ -d "$folder/tinker-$version.dist-info" ] && exit
rm -rf "$folder"
"${PYTHON:-python}" -m pip install --quiet --no-deps --target "$folder" "tinker==$version"
