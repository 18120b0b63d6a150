#!/bin/sh
# Start the Redis of the compose file. The first start creates a password in a volume of its own, where the
# other containers read it. Arguments go to Redis.
set -eu
here=$(dirname "$0")
password_file=${REDIS_PASSWORD_FILE:-/secret/redis-password}
folder=${REDIS_FOLDER:-/redis}
users=${TMPDIR:-/tmp}/users.acl

# The volume of an existing password may be read-only.
for writable in "$folder" $([ -s "$password_file" ] || dirname "$password_file"); do
  [ -w "$writable" ] || {
    echo "$writable cannot be written by user $(id -u). Change the owner of its volume to this user." >&2
    exit 1
  }
done
umask 077
if [ ! -s "$password_file" ]; then
  od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$password_file.new"
  mv "$password_file.new" "$password_file"
fi
# The list of users contains the hash, so that no list of processes or settings shows the password.
hash=$(tr -d '\n' <"$password_file" | sha256sum | cut -d ' ' -f 1)
sed "s/{password}/$hash/" "$here/users.acl" >"$users"
server=$(command -v valkey-server || command -v redis-server)
exec "$server" "$here/redis.conf" --aclfile "$users" --dir "$folder" "$@"
