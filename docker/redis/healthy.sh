#!/bin/sh
# Whether Redis answers who knows its password: it has read its log then.
set -eu
REDISCLI_AUTH=$(cat "${REDIS_PASSWORD_FILE:-/secret/redis-password}")
export REDISCLI_AUTH
cli=$(command -v valkey-cli || command -v redis-cli)
[ "$("$cli" "$@" ping)" = PONG ]
