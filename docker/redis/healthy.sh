#!/bin/sh
# Succeed if Redis answers a client with its password. It does so once it has read its log.
set -eu
REDISCLI_AUTH=$(cat "${REDIS_PASSWORD_FILE:-/secret/redis-password}")
export REDISCLI_AUTH
cli=$(command -v valkey-cli || command -v redis-cli)
[ "$("$cli" "$@" ping)" = PONG ]
