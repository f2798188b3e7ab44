#!/usr/bin/env bash
# The whole example in a kind cluster: make it, play chats, add an engine half way, and compare cache hit rates.
#   cluster/kind-demo.sh [--dry-run]    the demo; --dry-run prints the commands, and runs none
#   cluster/kind-demo.sh --one-more     what it does half way: one engine more
#   cluster/kind-demo.sh --down         removes the cluster
# Needs docker, kind, kubectl and Python 3, some 8 GiB of memory, and the network for images and a model.
set -euo pipefail
cd "$(dirname "$0")/.."

CRDS=https://github.com/kubernetes-sigs/gateway-api-inference-extension/releases/download/v1.5.0/manifests.yaml
VERSION=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)
PORT=${PORT:-8088}
KUBECTL=(kubectl --context kind-llm-ring --namespace llm)
FORWARD=("${KUBECTL[@]}" port-forward service/llm-ring-envoy "$PORT:80")
DRY=

say() { printf '+'; printf ' %q' "$@"; echo; }
# Prints a command, and runs it.
run() {
  say "$@"
  [ -n "$DRY" ] || "$@"
}
in_llm() { run "${KUBECTL[@]}" "$@"; }
one_more() {
  in_llm scale statefulset/llama --replicas 4
  in_llm rollout status statefulset/llama --timeout 900s  # it fetches a model first
}

case ${1:-} in
--one-more) one_more; exit ;;
--down) run kind delete cluster --name llm-ring; exit ;;
--dry-run) DRY=yes ;;
'') ;;
*) sed -n '2,6s/^# //p' "$0" >&2; exit 2 ;;
esac

run kind create cluster --config cluster/kind.yaml --wait 120s
run docker build --tag "llm-ring:$VERSION" .
run kind load docker-image "llm-ring:$VERSION" --name llm-ring

in_llm apply --server-side --filename "$CRDS"
in_llm wait --for condition=Established --timeout 60s crd/inferencepools.inference.networking.k8s.io
in_llm apply --filename k8s/
# Each engine fetches its model first.
in_llm rollout status statefulset/llama --timeout 900s
in_llm rollout status deployment/llm-ring-envoy --timeout 120s

say "${FORWARD[@]}"
if [ -z "$DRY" ]; then
  "${FORWARD[@]}" >/dev/null &
  trap 'kill $!' EXIT
fi
# Through all of it. Not `rollout status` of the picker: of two only the leader is Ready, so that never ends.
run curl --silent --show-error --fail --output /dev/null --retry 60 --retry-all-errors --retry-delay 2 \
  "http://127.0.0.1:$PORT/v1/models"
run python3 cluster/traffic.py --port "$PORT" --half-way "cluster/kind-demo.sh --one-more"
[ -z "$DRY" ] || one_more

printf '\nThe cluster stays, to look around: kubectl --context kind-llm-ring -n llm get pods -o wide\n'
printf 'Away with it: cluster/kind-demo.sh --down\n'
