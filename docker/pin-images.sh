#!/usr/bin/env bash
# Write the current digests of the base images into .env, which compose reads. Later builds then use the same
# images, even if the registry moves the tags. Run it again to update the digests.
#
#   docker/pin-images.sh
#
# No file of the repository contains digests, because they would exclude later security fixes.
set -euo pipefail
env_file=${ENV_FILE:-.env}

digest_of() {  # TAG: print name@sha256:…, the digest for all its platforms
  docker pull --quiet "$1" >/dev/null
  local digest
  digest=$(docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$1" | head -n 1)
  [[ $digest == *@sha256:* ]] || { echo "$1 comes from no registry: it has no digest." >&2; return 1; }
  echo "$digest"
}

# Read all digests before the first write.
python=$(digest_of "${PYTHON_TAG:-python:3.11-slim}")
redis=$(digest_of "${REDIS_TAG:-valkey/valkey:8.1}")
haproxy=$(digest_of "${HAPROXY_TAG:-haproxy:3.2}")
touch "$env_file"
kept=$(grep -vE '^(PYTHON|REDIS|HAPROXY)_IMAGE=' "$env_file" || true)
printf '%s\n' ${kept:+"$kept"} "PYTHON_IMAGE=$python" "REDIS_IMAGE=$redis" "HAPROXY_IMAGE=$haproxy" >"$env_file"
echo "$env_file: PYTHON_IMAGE=$python"
echo "$env_file: REDIS_IMAGE=$redis"
echo "$env_file: HAPROXY_IMAGE=$haproxy"
