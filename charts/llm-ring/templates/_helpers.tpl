{{/* Name of all objects. */}}
{{- define "llm-ring.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which Services and budgets select; takes (list $ component). They never change. */}}
{{- define "llm-ring.selectorLabels" -}}
{{- $ := index . 0 -}}
app.kubernetes.io/name: {{ default $.Chart.Name $.Values.nameOverride | trunc 63 }}
app.kubernetes.io/instance: {{ $.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* Labels of an object; takes (list $ component). */}}
{{- define "llm-ring.labels" -}}
{{- $ := index . 0 -}}
{{ include "llm-ring.selectorLabels" . }}
app.kubernetes.io/version: {{ $.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $.Chart.Name $.Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* An image by tag or by digest. */}}
{{- define "llm-ring.image" -}}
{{- $tag := default .default .image.tag -}}
{{ .image.repository }}{{ if hasPrefix "sha256:" $tag }}@{{ else }}:{{ end }}{{ $tag }}
{{- end -}}

{{- define "llm-ring.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "llm-ring.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "llm-ring.poolName" -}}
{{- default (include "llm-ring.fullname" .) .Values.pool.name -}}
{{- end -}}

{{/* The labels of the pool's pods, as YAML. */}}
{{- define "llm-ring.poolLabels" -}}
{{- if .Values.pool.matchLabels -}}
{{- toYaml .Values.pool.matchLabels -}}
{{- else -}}
llm-ring/pool: {{ include "llm-ring.poolName" . }}
{{- end -}}
{{- end -}}

{{/* Whether the picker reads an InferencePool: "true" or nothing. */}}
{{- define "llm-ring.byInferencePool" -}}
{{- if eq .Values.pool.source "InferencePool" }}true{{ end -}}
{{- end -}}

{{/* Whether one of several pickers leads: "true" or nothing. */}}
{{- define "llm-ring.leaderElection" -}}
{{- if and (gt (int .Values.replicas) 1) (eq .Values.ha.mode "active-passive") }}true{{ end -}}
{{- end -}}

{{/* The picker's configuration, as YAML. */}}
{{- define "llm-ring.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- range $key := list "pool" "namespace" "selector" "target_ports" "leader_election" -}}
{{- if hasKey (default dict $config.kubernetes) $key -}}
{{- fail (printf "config.kubernetes.%s: the chart sets it, from `pool`, `replicas` and `ha`" $key) -}}
{{- end -}}
{{- end -}}
{{- if .Values.tls.secretName -}}
{{- if $config.tls -}}
{{- fail "tls.secretName and config.tls: set one of them" -}}
{{- end -}}
{{- $_ := set $config "tls" (dict "mode" "files" "cert" "/etc/llm-ring-tls/tls.crt" "key" "/etc/llm-ring-tls/tls.key") -}}
{{- end -}}
{{- if include "llm-ring.leaderElection" . -}}
{{- $_ := set $config "kubernetes" (merge (dict "lease" (include "llm-ring.lease" .)) (default dict $config.kubernetes)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* The Lease that pickers elect their leader by. */}}
{{- define "llm-ring.lease" -}}
{{- dig "kubernetes" "lease" "" .Values.config | default (printf "epp-%s-%s.llm-d.ai" .Release.Namespace (include "llm-ring.poolName" .)) -}}
{{- end -}}

{{/* Whether the picker's port 9002 speaks TLS: "true" or nothing. */}}
{{- define "llm-ring.servesTls" -}}
{{- if ne (dig "tls" "mode" "self-signed" .Values.config) "off" }}true{{ end -}}
{{- end -}}

{{/* Ports, from the configuration. */}}
{{- define "llm-ring.grpcPort" -}}{{ dig "server" "grpc_port" 9002 .Values.config }}{{- end -}}
{{- define "llm-ring.healthPort" -}}{{ dig "server" "health_port" 9003 .Values.config }}{{- end -}}
{{- define "llm-ring.metricsPort" -}}{{ dig "server" "metrics_port" 9090 .Values.config }}{{- end -}}

{{/* Seconds that the picker takes to end (drain.*), and some to spare. */}}
{{- define "llm-ring.gracePeriod" -}}
{{- $drain := default dict .Values.config.drain -}}
{{- add (dig "linger_seconds" 5 $drain) (dig "timeout_seconds" 60 $drain) 15 -}}
{{- end -}}

{{/* Spread over nodes and zones; takes (list $ component). */}}
{{- define "llm-ring.spread" -}}
{{- range $i, $key := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
{{- if $i }}
{{ end -}}
- topologyKey: {{ $key }}
  maxSkew: 1
  whenUnsatisfiable: ScheduleAnyway
  # A rollout's old pods do not count.
  matchLabelKeys: [pod-template-hash]
  labelSelector:
    matchLabels:
      {{- include "llm-ring.selectorLabels" $ | nindent 6 }}
{{- end }}
{{- end -}}

{{/* What no container of ours needs. */}}
{{- define "llm-ring.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end -}}
