#!/usr/bin/env bash
# Install the programs of rows.py into two environments of .programs/, because they need different
# versions of the openai package.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

install() {
  local folder=.programs/$1
  shift
  [ "$(cat "$folder/.installed" 2>/dev/null)" = "$*" ] && return
  rm -rf "$folder"
  "${PYTHON:-python}" -m venv "$folder"
  "$folder/bin/python" -m pip install --quiet --no-compile "$@"
  echo "$*" >"$folder/.installed"
}

install most litellm==1.110.2 langchain-openai==1.7.4 langchain-anthropic==1.7.10 instructor==1.17.0 \
  dspy==3.4.1 llm==0.36 openai==3.3.0 anthropic==2.14.0
install inspect inspect-ai==0.3.285 openai==3.54.0 anthropic==2.14.0
