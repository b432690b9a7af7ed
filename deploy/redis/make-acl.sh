#!/bin/sh
# Makes the server's ACL file: the rules of users.acl with the passwords' hashes. Writes it to standard output.
#
#   sh make-acl.sh DIRECTORY >users.acl            then: redis-server ... --aclfile users.acl
#   sh make-acl.sh DIRECTORY --setinfo             for Redis 7.2 or later, and Valkey: clients may say which library
#                                                  they are; elsewhere such a file isn't accepted
#
# DIRECTORY holds one file a role with its password on one line: producer, listener, control, stage, maintenance,
# observer. A file `<role>.old` beside it holds the one that is being replaced, which is valid as well. A role without a
# file gets no user. The user `default` is off: without a name and a password nobody gets in.
#
# Needs awk and sha256sum, as in the images of Redis and Valkey. Passwords stay out of arguments and of the output.
# Says no with a line on standard error and status 1, and writes nothing then.

set -eu
LC_ALL=C
export LC_ALL

fail() {
  echo "make-acl.sh: $1" >&2
  exit 1
}

directory=${1:-}
extra=
[ -n "$directory" ] || fail "usage: make-acl.sh DIRECTORY [--setinfo]"
[ -d "$directory" ] || fail "$directory is not a directory"
case ${2:-} in
  "") ;;
  --setinfo) extra="+client|setinfo" ;;
  *) fail "unknown option $2" ;;
esac
rules=$(dirname "$0")/users.acl
[ -r "$rules" ] || fail "$rules can't be read"

# The hash of the password in a file, as the server wants it. A line's end is not part of a password.
hash() {
  [ -r "$1" ] || fail "$1 can't be read"
  password=$(tr -d '\r' <"$1")
  [ -n "$password" ] || fail "$1 is empty"
  case $password in *"
"*) fail "$1 has more than one line" ;; esac
  [ "${#password}" -ge 16 ] || fail "$1 is too short: 16 bytes or more are needed"
  sum=$(printf %s "$password" | sha256sum)
  printf '#%s' "${sum%% *}"
}

hashes=
found=
for role in $(sed -n 's/^user //p' "$rules"); do
  [ -e "$directory/$role" ] || continue
  now=$(hash "$directory/$role")
  case " $found " in *" $now "*) fail "$directory/$role holds the password of another role" ;; esac
  found="$found $now"
  if [ -e "$directory/$role.old" ]; then
    now="$now $(hash "$directory/$role.old")"
  fi
  hashes="$hashes$role $now
"
done
[ -n "$hashes" ] || fail "$directory has no password of any role"

echo "user default reset off"
printf '%s' "$hashes" | awk -v extra="$extra" '
  # First the hashes by role, then the rules: a user in one line, selectors closed up, {p} as a pattern a length.
  BEGIN {
    digits[1] = "[0-9]"
    for (n = 2; n <= 4; n++) digits[n] = digits[n - 1] "[0-9]"
  }
  FILENAME == "-" { role = $1; sub(/^[^ ]+ /, ""); hashes[role] = $0; next }
  /^#/ || NF == 0 { next }
  $1 == "user" {
    flush_line()
    if ($2 in hashes) line = "user " $2 " reset on " hashes[$2] " resetchannels -@all" (extra == "" ? "" : " " extra)
    next
  }
  line != "" {
    for (i = 1; i <= NF; i++) {
      if ($i == "(") { line = line " ("; glue = 1 }
      else if ($i == ")") line = line ")"
      else if (at = index($i, "{p}")) {
        for (n = 1; n <= 4; n++) add(substr($i, 1, at) digits[n] substr($i, at + 2))
      }
      else add($i)
    }
  }
  END { flush_line() }
  function add(word) { line = line (glue ? "" : " ") word; glue = 0 }
  function flush_line() { if (line != "") print line; line = "" }
' - "$rules"
