#!/bin/sh
# Makes a password for each role of users.acl, in a directory: one file a role, as make-acl.sh and compose.yaml want it.
# One more is Grafana's, of its user admin.
#
#   sh make-secrets.sh [DIRECTORY]                 else the directory secrets beside this script
#
# What is there already stays. The directory is its owner's alone. The files in it can be read by everybody who gets
# into it: the processes in the containers have a user of their own.

set -eu
here=$(dirname "$0")
directory=${1:-$here/secrets}
mkdir -p "$directory"
chmod 700 "$directory"
for role in $(sed -n 's/^user //p' "$here/users.acl") grafana; do
  [ -e "$directory/$role" ] && continue
  password=$(head -c 24 /dev/urandom | od -An -tx1 | tr -d ' \n')
  [ "${#password}" -eq 48 ] || { echo "make-secrets.sh: /dev/urandom can't be read" >&2; exit 1; }
  printf '%s\n' "$password" >"$directory/$role"
  chmod 444 "$directory/$role"
done
