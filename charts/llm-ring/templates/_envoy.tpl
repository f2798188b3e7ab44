{{/* The configuration of the standalone Envoy. */}}
{{- define "llm-ring.envoyConfig" -}}
{{- if gt (int (dig "answers" "destinations" 1 .Values.config)) 1 -}}
{{- fail "envoy.enabled: config.answers.destinations must be 1, since this Envoy says 503 to a list" -}}
{{- end -}}
{{- $open := eq .Values.pool.failureMode "FailOpen" -}}
{{- $fallback := and $open .Values.envoy.fallback.host -}}
{{- $domain := printf "%s.svc.%s" .Release.Namespace .Values.clusterDomain -}}
{{- $name := include "llm-ring.fullname" . -}}
admin:
  address: { socket_address: { address: 127.0.0.1, port_value: 9901 } }

# Clients beyond this many at once are turned away; without a number there is no limit.
overload_manager:
  resource_monitors:
  - name: envoy.resource_monitors.global_downstream_max_connections
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.resource_monitors.downstream_connections.v3.DownstreamConnectionsConfig
      max_active_downstream_connections: 40000

static_resources:
  listeners:
  - name: inference
    address: { socket_address: { address: 0.0.0.0, port_value: 8080 } }
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: inference
          stream_idle_timeout: {{ .Values.envoy.idleTimeout }}
          access_log:
          - name: envoy.access_loggers.stdout
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.access_loggers.stream.v3.StdoutAccessLog
              log_format:
                text_format_source:
                  inline_string: "%START_TIME% %REQ(X-REQUEST-ID)% %REQ(:METHOD)% %REQ(:PATH)% %RESPONSE_CODE% flags=%RESPONSE_FLAGS% details=%RESPONSE_CODE_DETAILS% upstream=%UPSTREAM_HOST% ms=%DURATION%\n"
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              {{- if $fallback }}
              # The picker's answer makes Envoy look again: with a destination it is the first route, and without one,
              # since no picker answered, the second.
              - match: { prefix: "/", headers: [{ name: x-gateway-destination-endpoint, present_match: true }] }
                route: { cluster: engines, timeout: 0s, idle_timeout: {{ .Values.envoy.idleTimeout }} }
              - match: { prefix: "/" }
                route: { cluster: fallback, timeout: 0s, idle_timeout: {{ .Values.envoy.idleTimeout }} }
              {{- else }}
              - match: { prefix: "/" }
                # Answers are long: no limit but silence.
                route: { cluster: engines, timeout: 0s, idle_timeout: {{ .Values.envoy.idleTimeout }} }
              {{- end }}
          http_filters:
          # A client that names its own destination would reach any address that Envoy can. Not
          # request_headers_to_remove on the route: that acts later, on the picker's header.
          - name: envoy.filters.http.header_mutation
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
              mutations:
                request_mutations:
                - remove: x-gateway-destination-endpoint
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service:
                envoy_grpc: { cluster_name: picker }
                # When a picker has just gone, the next one is asked.
                retry_policy:
                  retry_on: connect-failure,refused-stream,reset,unavailable
                  num_retries: 2
                  retry_back_off: { base_interval: 0.01s, max_interval: 0.1s }
                  host_selection_retry_max_attempts: 3
                  retry_host_predicate:
                  - name: envoy.retry_host_predicates.previous_hosts
                    typed_config:
                      "@type": type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate
              # pool.failureMode. Once a picker has been given a part of a body, Envoy no longer has it, and fails the
              # request either way.
              failure_mode_allow: {{ $open }}
              # Not 500: the client may try again.
              status_on_error: { code: ServiceUnavailable }
              {{- if $fallback }}
              route_cache_action: CLEAR
              {{- end }}
              processing_mode:
                request_header_mode: SEND
                request_body_mode: FULL_DUPLEX_STREAMED
                request_trailer_mode: SEND
                response_header_mode: SEND
                response_body_mode: FULL_DUPLEX_STREAMED
                response_trailer_mode: SEND
              # How the picker learns which engine answered, and why one did not.
              response_attributes: [upstream.address, response.flags, response.code_details]
              metadata_options:
                receiving_namespaces: { untyped: [envoy.lb] }
                forwarding_namespaces: { untyped: [envoy.lb, envoy.lb.subset_hint] }
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router

  # For the kubelet and Prometheus, who may not have the whole admin page.
  - name: status
    address: { socket_address: { address: 0.0.0.0, port_value: 8081 } }
    ignore_global_conn_limit: true
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: status
          route_config:
            virtual_hosts:
            - name: status
              domains: ["*"]
              routes:
              - { match: { path: /ready }, route: { cluster: admin } }
              - { match: { path: /stats/prometheus }, route: { cluster: admin } }
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router

  clusters:
  # Dials what the picker's header says: one ip:port.
  - name: engines
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    connect_timeout: 2s
    original_dst_lb_config:
      use_http_header: true
      http_header_name: x-gateway-destination-endpoint
    {{- include "llm-ring.envoyEngines" . | nindent 4 }}
  {{- if $fallback }}

  # Any engine, while no picker answers.
  - name: fallback
    type: STRICT_DNS
    connect_timeout: 2s
    {{- include "llm-ring.envoyEngines" . | nindent 4 }}
    load_assignment:
      cluster_name: fallback
      endpoints:
      - lb_endpoints:
        - endpoint: { address: { socket_address: { address: {{ .Values.envoy.fallback.host }}, port_value: {{ .Values.envoy.fallback.port }} } } }
  {{- end }}

  # The pickers one by one, of those who say that they serve. When none of the addresses that Envoy knows does (DNS may
  # be half a minute behind a rollout), the Service, which is not behind.
  - name: picker
    type: STRICT_DNS
    connect_timeout: 1s
    health_checks:
    - timeout: 2s
      interval: 1s
      no_traffic_interval: 1s
      unhealthy_threshold: 2
      healthy_threshold: 1
      # The Service's address stands for another pod each time.
      reuse_connection: false
      grpc_health_check: { service_name: envoy.service.ext_proc.v3.ExternalProcessor }
    # Who says no gets nothing, even if all say no.
    common_lb_config: { healthy_panic_threshold: { value: 0 } }
    # A request holds a stream for as long as its answer takes; the default is 1,024.
    circuit_breakers:
      thresholds: [{ max_connections: 40000, max_pending_requests: 40000, max_requests: 40000, max_retries: 1000 }]
    {{- if include "llm-ring.servesTls" . }}
    # Any certificate: the picker's is made at its start.
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: { alpn_protocols: [h2], validation_context: {} }
    {{- end }}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config:
          http2_protocol_options: { connection_keepalive: { interval: 30s, timeout: 10s } }
    load_assignment:
      cluster_name: picker
      # The Service only when no picker is left, not already when some are.
      policy: { overprovisioning_factor: 100000 }
      endpoints:
      - lb_endpoints:
        - endpoint: { address: { socket_address: { address: {{ $name }}-pods.{{ $domain }}, port_value: {{ include "llm-ring.grpcPort" . }} } } }
      - priority: 1
        lb_endpoints:
        - endpoint: { address: { socket_address: { address: {{ $name }}.{{ $domain }}, port_value: {{ include "llm-ring.grpcPort" . }} } } }

  - name: admin
    type: STATIC
    load_assignment:
      cluster_name: admin
      endpoints:
      - lb_endpoints:
        - endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: 9901 } } }
{{- end -}}

{{/* What all clusters of engines have. */}}
{{- define "llm-ring.envoyEngines" -}}
circuit_breakers:
  thresholds: [{ max_connections: 40000, max_pending_requests: 40000, max_requests: 40000 }]
typed_extension_protocol_options:
  envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
    "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
    {{- with .Values.envoy.maxRequestsPerConnection }}
    common_http_protocol_options: { max_requests_per_connection: {{ . }} }
    {{- end }}
    explicit_http_config: { {{ if eq .Values.pool.appProtocol "kubernetes.io/h2c" }}http2_protocol_options{{ else }}http_protocol_options{{ end }}: {} }
{{- end -}}
