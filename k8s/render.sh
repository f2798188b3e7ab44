#!/usr/bin/env bash
# Writes the part of this example that the chart has: 20-rbac, 21-inferencepool, 22-picker, 23-envoy.
#   k8s/render.sh [FOLDER]      default: k8s itself
# It runs $HELM, or `helm`. A test renders anew and compares.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(cd "${1:-k8s}" && pwd)

part() {
  local file=$1 comment=$2 template shown=()
  shift 2
  for template; do shown+=(--show-only "templates/$template.yaml"); done
  {
    printf '# %s\n# Written by k8s/render.sh from charts/llm-ring; change values, not this file.\n' "$comment"
    # What Helm says of itself is not true of a file that kubectl applies.
    "${HELM:-helm}" template llm-ring charts/llm-ring --namespace llm --kube-version 1.34.0 \
      --values charts/llm-ring/values/standalone-envoy.yaml \
      --set-string pool.name=llama,pool.matchLabels.app=llama --set 'pool.targetPorts={8080}' \
      "${shown[@]}" |
      sed -e '/^# Source: /d' -e '/helm\.sh\/chart: /d' -e '/managed-by: Helm$/d'
  } >"$folder/$file.yaml"
}

part 20-rbac "What the picker may read: pods, the pool and its objectives, in its own namespace; and its Lease." rbac
part 21-inferencepool "The pool: which pods, on which port, and who picks. Gateways read it, and so does the picker." inferencepool
part 22-picker "The picker: one leads, one waits." configmap service deployment pdb
part 23-envoy "The gateway: an Envoy that asks the picker about each request. Clients go to the Service llm-ring-envoy." envoy
