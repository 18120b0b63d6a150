#!/usr/bin/env bash
# Ask the registry what the tags of our base images are now, and write the digests into .env, which compose
# reads: from then on the same images are built from, whatever the tags come to mean.
#
#   docker/pin-images.sh            again: what the tags mean by then
#
# Digests stand in no file of the repository: they would be those of one day, without later security fixes.
set -euo pipefail
env_file=${ENV_FILE:-.env}

digest_of() {  # TAG: name@sha256:… of all its platforms
  docker pull --quiet "$1" >/dev/null
  local digest
  digest=$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | head -n 1)
  [[ $digest == *@sha256:* ]] || { echo "$1 comes from no registry: it has no digest." >&2; return 1; }
  echo "$digest"
}

# Both before anything is written.
python=$(digest_of "${PYTHON_TAG:-python:3.11-slim}")
redis=$(digest_of "${REDIS_TAG:-valkey/valkey:8.1}")
touch "$env_file"
kept=$(grep -vE '^(PYTHON|REDIS)_IMAGE=' "$env_file" || true)
printf '%s\n' ${kept:+"$kept"} "PYTHON_IMAGE=$python" "REDIS_IMAGE=$redis" >"$env_file"
echo "$env_file: PYTHON_IMAGE=$python"
echo "$env_file: REDIS_IMAGE=$redis"
