//! A real Envoy in front of the picker, in the two shapes that gateways give it.

use std::net::SocketAddr;
use std::process::Command;

use super::client::get;
use super::eventually;
use super::process::{Process, folder};
use super::tools::Tools;

/// How a gateway finds its model servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// It dials what the picker's header says.
    OriginalDst,
    /// It knows them, and takes the picker's list from metadata.
    OverrideHost,
}

/// How a gateway is set up.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Front {
    pub(crate) shape: Shape,
    pub(crate) request_mode: &'static str,
    pub(crate) response_mode: &'static str,
    /// To the model servers.
    pub(crate) http2: bool,
    /// To the picker.
    pub(crate) tls: bool,
    /// Whether the next of the picker's endpoints is tried; with them Envoy sends a body with trailers twice
    /// (envoyproxy/envoy#45470).
    pub(crate) retries: bool,
}

/// `FULL_DUPLEX_STREAMED` both ways, in each shape: what gateways ask pickers for.
pub(crate) const ORIGINAL_DST: Front = Front {
    shape: Shape::OriginalDst,
    request_mode: DUPLEX,
    response_mode: DUPLEX,
    http2: false,
    tls: false,
    retries: false,
};
pub(crate) const OVERRIDE_HOST: Front = Front { shape: Shape::OverrideHost, ..ORIGINAL_DST };
pub(crate) const DUPLEX: &str = "FULL_DUPLEX_STREAMED";

const RETRIES: &str =
    "retry_policy: { retry_on: 'connect-failure,refused-stream', num_retries: 1 }";
const TLS: &str = r#"transport_socket:
      name: envoy.transport_sockets.tls
      typed_config:
        "@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext
        common_tls_context: { validation_context: {} }"#;

/// A running Envoy.
pub(crate) struct Envoy {
    pub(crate) process: Process,
    /// Where clients go.
    pub(crate) port: u16,
}

impl Envoy {
    pub(crate) async fn start(
        tools: &Tools,
        front: Front,
        picker_port: u16,
        hosts: &[SocketAddr],
    ) -> Self {
        let template = match front.shape {
            Shape::OriginalDst => include_str!("../envoy-original-dst.yaml"),
            Shape::OverrideHost => include_str!("../envoy-override-host.yaml"),
        };
        let hosts: Vec<String> = hosts
            .iter()
            .map(|host| {
                let (ip, port) = (host.ip(), host.port());
                format!("{{ endpoint: {{ address: {{ socket_address: {{ address: {ip}, port_value: {port} }} }} }} }}")
            })
            .collect();
        let upstream_http = if front.http2 {
            "http2_protocol_options: {}"
        } else {
            "http_protocol_options: { enable_trailers: true }"
        };
        let config = template
            .replace("${request_mode}", front.request_mode)
            .replace("${response_mode}", front.response_mode)
            .replace("${upstream_http}", upstream_http)
            .replace("${epp_tls}", if front.tls { TLS } else { "" })
            .replace("${retries}", if front.retries { RETRIES } else { "" })
            .replace("${epp_port}", &picker_port.to_string())
            .replace("${hosts}", &hosts.join(", "));
        let folder = folder("envoy");
        let (file, address) = (folder.join("envoy.yaml"), folder.join("admin-address"));
        std::fs::write(&file, config).unwrap();
        let process = Process::start(
            &format!("envoy ({:?})", front.shape),
            Command::new(&tools.envoy)
                .arg("-c")
                .arg(&file)
                .arg("--admin-address-path")
                .arg(&address)
                .args(["--concurrency", "1", "--disable-hot-restart", "-l", "warning"])
                .args(["--file-flush-interval-msec", "20"]),
        );
        let admin: SocketAddr = eventually("Envoy's admin address", async || {
            assert!(process.ended().is_none(), "envoy ended early");
            std::fs::read_to_string(&address).ok()?.trim().parse().ok()
        })
        .await;
        eventually("Envoy to be ready", async || {
            let answer = get("/ready").answer(admin.port()).await;
            (answer.text().trim() == "LIVE").then_some(())
        })
        .await;
        let listeners = get("/listeners?format=json").answer(admin.port()).await.json();
        let address = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
        let port = address["port_value"].as_u64().and_then(|port| u16::try_from(port).ok());
        Self { process, port: port.expect("the listener's port") }
    }
}
