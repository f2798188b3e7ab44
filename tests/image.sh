#!/usr/bin/env bash
# The image's last stage without a container engine: its files in a folder, and the picker run in there as a pod runs it.
#   tests/image.sh BINARY [ARGUMENT...]
# The entrypoint is run with these arguments, by user 65532, in the folder as its root, read-only, without capabilities
# and without a way to more of them. It is this very process: signals reach it. With no arguments only the sizes are
# printed. Needs root, for the mounts.
#   VOLUMES="/here/config:/etc/llm-ring /here/token:/var/run/secrets/kubernetes.io/serviceaccount"
#           folders or files to be seen there, read-only, as volumes are
#   FOLDER  where to assemble; default: a new temporary folder, which stays
#
# From the Dockerfile: /llm-ring, the entrypoint, the user. What stands for the base image (distroless/cc-debian12) comes
# from this machine: the libraries that the binary asks for, CA certificates, the user's entry, time zones not at
# all. So this tests what the picker needs of its image, not the base image itself.
set -euo pipefail
cd "$(dirname "$0")/.."
binary=$(realpath "$1")
shift
folder=${FOLDER:-$(mktemp -d "${TMPDIR:-/tmp}/llm-ring-image.XXXXXX")}

# That the Dockerfile still says what is done here.
for line in 'FROM gcr.io/distroless/cc-debian12:nonroot' 'COPY --from=build /src/target/release/llm-ring /llm-ring' \
  'ENTRYPOINT ["/llm-ring"]'; do
  grep -qxF "$line" Dockerfile || { echo "tests/image.sh: the Dockerfile no longer has: $line" >&2; exit 1; }
done

rm -f "$folder/llm-ring"
mkdir -p "$folder"/{etc/ssl/certs,proc,dev,tmp,home/nonroot,var/run}
chmod 1777 "$folder/tmp"
# What the base image brings.
while read -r library; do
  mkdir -p "$folder$(dirname "$library")"
  cp -L "$library" "$folder$library"
done < <(ldd "$binary" | grep -o '/[^ ]*')
cp -L /etc/ssl/certs/ca-certificates.crt "$folder/etc/ssl/certs/" 2>/dev/null ||
  echo "tests/image.sh: this machine has no CA certificates to copy" >&2
echo 'nonroot:x:65532:65532:nonroot:/home/nonroot:/sbin/nologin' >"$folder/etc/passwd"
echo 'nonroot:x:65532:' >"$folder/etc/group"
base=$(du -sk --apparent-size "$folder" | cut -f1)
# What the Dockerfile adds.
cp "$binary" "$folder/llm-ring"
strip --strip-debug "$folder/llm-ring"
chmod 755 "$folder/llm-ring"
# What a kubelet adds.
cp -L /etc/hosts /etc/resolv.conf "$folder/etc/" 2>/dev/null || true
touch "$folder/dev/null"

binary_size=$(stat -c %s "$folder/llm-ring")
echo "tests/image.sh: $folder: binary $((binary_size / 1048576)) MiB, what stands for the base $((base / 1024)) MiB" >&2
[ $# -gt 0 ] || exit 0

for volume in ${VOLUMES:-}; do
  at=$folder${volume#*:}
  if [ -d "${volume%%:*}" ]; then mkdir -p "$at"; else mkdir -p "$(dirname "$at")" && touch "$at"; fi
done
export FOLDER=$folder VOLUMES=${VOLUMES:-}
# shellcheck disable=SC2016  # for the inner shell
exec unshare --mount -- bash -euc '
  mount --bind "$FOLDER" "$FOLDER"
  mount --bind /dev/null "$FOLDER/dev/null"
  for volume in $VOLUMES; do
    mount --bind "${volume%%:*}" "$FOLDER${volume#*:}"
    mount -o remount,bind,ro "$FOLDER${volume#*:}"
  done
  mount -o remount,bind,ro "$FOLDER"
  exec setpriv --no-new-privs chroot --userspec=65532:65532 --groups= "$FOLDER" /llm-ring "$@"
' bash "$@"
