#!/usr/bin/env bash
# Write wire_pb2.py and wire_pb2.pyi from wire.proto, with a generator in a temporary environment.
#
# Generated code runs on the protobuf version of its generator and on every later one. The generator is
# therefore pinned to the oldest version that pyproject.toml allows: grpcio-tools 1.71.0 generates for
# protobuf 5.29.0.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

generator=$(mktemp -d)
trap 'rm -rf "$generator"' EXIT
"${PYTHON:-python3}" -m venv "$generator"
"$generator/bin/pip" install --quiet 'grpcio-tools==1.71.0' 'setuptools<81'
"$generator/bin/python" -W ignore -m grpc_tools.protoc -I. --python_out=. --pyi_out=. cotrain/wire/proto/wire.proto
