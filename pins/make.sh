#!/usr/bin/env bash
# Write hashes.txt and pip.txt from ../constraints.txt. They list every file of each version on the package
# index, so they apply to every platform and Python. uv reads the index, and builds and installs nothing.
#
#   pins/make.sh            after a change of constraints.txt
set -euo pipefail
cd "$(dirname "$0")"
uv=${UV:-uv}
header="# Made by pins/make.sh (make hashes) from constraints.txt: change that one. docs/adr/0018-hashes.md says how they are used."
compile() {
  "$uv" pip compile --quiet --no-config --universal --python-version 3.11 --generate-hashes \
    --no-annotate --no-header "$@"
}
# torch has no hash here, because the index determines its build (CPU or CUDA). The libraries that its CUDA
# build requires have one.
{ echo "$header"; compile --no-emit-package torch ../constraints.txt; } >hashes.txt.new
{ echo "$header"; grep '^pip==' ../constraints.txt | compile --no-deps -; } >pip.txt.new
mv hashes.txt.new hashes.txt
mv pip.txt.new pip.txt
