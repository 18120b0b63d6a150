#!/usr/bin/env bash
# Fetch tinker_cookbook for the tests that run its programs.
#
# It goes to .sdk/ without resolving its dependencies: what .venv has satisfies them (its torch above
# all), requirements.txt lists the rest, and PYTHONPATH puts it first. dill, with which `datasets`
# names its caches, tells libraries from a user's code by `site-packages` in their path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

wanted=tests/cookbook/requirements.txt
folder=.sdk/tinker_cookbook-0.6.1

cmp --quiet "$wanted" "$folder/requirements.txt" && exit
rm -rf "$folder"
"${PYTHON:-python}" -m pip install --quiet --no-compile --no-deps \
  --target "$folder/site-packages" --requirement "$wanted"
cp "$wanted" "$folder/"
