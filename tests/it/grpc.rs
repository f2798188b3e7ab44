//! The gRPC ports seen without Envoy: health, TLS, and gateways that only ask for a pick.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3 as ext_proc;
use ext_proc::external_processor_client::ExternalProcessorClient;
use ext_proc::processing_request::Request;
use ext_proc::processing_response::Response;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use crate::harness::client::{chat, chat_body};
use crate::harness::envoy::{Front, ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::picker::{Picker, endpoints};
use crate::harness::process::folder;
use crate::harness::{Stack, eventually, run, within};

/// Names that gateways, kubelets and the upstream chart ask for.
const HEALTH_NAMES: [&str; 5] = [
    "",
    "liveness",
    "readiness",
    "inference-extension",
    "envoy.service.ext_proc.v3.ExternalProcessor",
];

fn three() -> String {
    endpoints(
        [("a", "10.0.0.1:8000"), ("b", "10.0.0.2:8000"), ("c", "[fd00::3]:8000")]
            .map(|(name, address)| (name, address.parse().unwrap())),
    )
}

async fn connect(port: u16) -> Channel {
    Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap().connect().await.unwrap()
}

#[test]
fn health_answers_to_every_name_on_both_ports_until_the_drain() {
    run(async {
        let picker = Picker::start("drain: { timeout_seconds: 5 }", &three()).await;
        for port in [picker.grpc, picker.health] {
            let mut health = HealthClient::new(connect(port).await);
            for name in HEALTH_NAMES {
                let request = HealthCheckRequest { service: name.to_owned() };
                let answer = health.check(request).await.unwrap().into_inner();
                assert_eq!(answer.status().as_str_name(), "SERVING", "{name:?}");
            }
            let request = HealthCheckRequest { service: "no-such-name".to_owned() };
            assert_eq!(health.check(request).await.unwrap_err().code(), tonic::Code::NotFound);
        }
        assert_eq!(picker.get("/livez").await.status, 200);
        assert_eq!(picker.get("/readyz").await.status, 200);

        // Whoever watches is told of the drain; the picker that drains is alive all the same.
        let mut watches = Vec::new();
        let mut health = HealthClient::new(connect(picker.grpc).await);
        for name in HEALTH_NAMES {
            let request = HealthCheckRequest { service: name.to_owned() };
            let mut watch = health.watch(request).await.unwrap().into_inner();
            watch.message().await.unwrap();
            watches.push((name, watch));
        }
        picker.process.signal("TERM");
        for (name, mut watch) in watches {
            if name == "liveness" {
                continue;
            }
            let status = within("the change", watch.message()).await.unwrap().unwrap();
            assert_eq!(status.status().as_str_name(), "NOT_SERVING", "{name:?}");
        }
        assert_eq!(picker.process.end().await.code(), Some(0));
    });
}

/// As NGINX Gateway Fabric asks: no `protocol_config`, no pseudo headers, one body, and an end; it then waits for the
/// pick and for the end of the stream.
#[test]
fn a_gateway_that_half_closes_after_its_request_gets_the_pick_and_the_end() {
    run(async {
        let picker = Picker::start("", &three()).await;
        let mut client = ExternalProcessorClient::new(connect(picker.grpc).await);
        let header = |key: &str, value: &str| HeaderValue {
            key: key.to_owned(),
            raw_value: value.as_bytes().to_vec(),
            ..HeaderValue::default()
        };
        let headers = vec![
            header("content-type", "application/json"),
            header("x-request-id", "from-nginx"),
            header("x-conversation-id", "nginx"),
        ];
        let headers = ext_proc::HttpHeaders {
            headers: Some(HeaderMap { headers }),
            ..ext_proc::HttpHeaders::default()
        };
        let body = ext_proc::HttpBody {
            body: chat_body("who kept the bridge?").into_bytes(),
            end_of_stream: true,
            ..ext_proc::HttpBody::default()
        };
        let mut picks = BTreeMap::new();
        for end_of_stream in [true, false, true] {
            let body = ext_proc::HttpBody { end_of_stream, ..body.clone() };
            let messages = [Request::RequestHeaders(headers.clone()), Request::RequestBody(body)];
            let messages = messages.map(|request| ext_proc::ProcessingRequest {
                request: Some(request),
                ..ext_proc::ProcessingRequest::default()
            });
            let mut answers =
                client.process(tokio_stream::iter(messages)).await.unwrap().into_inner();
            let first = within("the pick", answers.message()).await.unwrap().unwrap();
            let Some(Response::RequestHeaders(headers)) = first.response else {
                panic!("the headers are not answered first: {first:?}");
            };
            let mutation = headers.response.unwrap().header_mutation.unwrap();
            let set = mutation.set_headers.into_iter().map(|option| option.header.unwrap());
            let pick = set.into_iter().find(|it| it.key == "x-gateway-destination-endpoint");
            let pick = String::from_utf8(pick.unwrap().raw_value).unwrap();
            *picks.entry(pick).or_insert(0) += 1;
            while within("the end", answers.message()).await.unwrap().is_some() {}
            picker.is_idle().await;
        }
        assert_eq!(picks.len(), 1, "one conversation went to {picks:?}");
        let record = picker.record("from-nginx").await;
        assert_eq!(record["outcome"]["ending"], "unobserved");
        assert_eq!(picks.keys().next().unwrap().as_str(), record["destinations"][0]);
        picker.reaches("llm_ring_outcomes_total", "ending=\"unobserved\"", 3.0).await;
    });
}

#[test]
fn behind_a_self_signed_certificate_both_shapes_work() {
    run(async {
        let fronts = [ORIGINAL_DST, OVERRIDE_HOST].map(|front| Front { tls: true, ..front });
        let config = "tls: { mode: self-signed }";
        let Some(stack) = Stack::start(config, 2, &fronts).await else { return };
        for envoy in &stack.envoys {
            let call = chat("is this private?");
            assert_eq!(call.answer(envoy.port).await.status, 200);
            assert_eq!(stack.picker.record(&call.id).await["outcome"]["ending"], "complete");
        }
    });
}

#[test]
fn a_gateway_that_speaks_something_else_is_named_in_the_log_at_its_first_try() {
    run(async {
        for (tls, said) in
            [("off", "speaks TLS to a port"), ("self-signed", "speaks plain text to a port")]
        {
            let config = format!("tls: {{ mode: \"{tls}\" }}");
            let fronts = [Front { tls: tls == "off", ..ORIGINAL_DST }];
            let Some(stack) = Stack::start(&config, 1, &fronts).await else { return };
            assert_eq!(stack.answer(&chat("hello?")).await.status, 500);
            let heard = |line: &str| (line.contains(said) && line.contains("WARN")).then_some(());
            stack.picker.process.line(said, heard).await;
        }
    });
}

#[test]
fn own_certificates_are_used_and_read_again_when_they_change() {
    run(async {
        let folder = folder("certificates");
        let write = |name: &str| {
            let made = rcgen::generate_simple_self_signed(vec![name.to_owned()]).unwrap();
            std::fs::write(folder.join("cert.pem"), made.cert.pem()).unwrap();
            std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).unwrap();
            (name.to_owned(), Certificate::from_pem(made.cert.pem()))
        };
        let health = async |port: u16, (name, certificate): &(String, Certificate)| {
            let tls = ClientTlsConfig::new()
                .ca_certificate(certificate.clone())
                .domain_name(name.clone());
            let endpoint = Endpoint::from_shared(format!("https://127.0.0.1:{port}")).unwrap();
            let channel = endpoint.tls_config(tls).unwrap().connect().await.ok()?;
            let answer = HealthClient::new(channel).check(HealthCheckRequest::default()).await;
            answer.ok().map(|answer| answer.into_inner().status)
        };
        let old = write("old.test");
        let config = format!(
            "tls: {{ mode: files, cert: {0}/cert.pem, key: {0}/key.pem }}",
            folder.display()
        );
        let picker = Picker::start(&config, &three()).await;
        assert_eq!(health(picker.grpc, &old).await, Some(1));

        // A key that fits no certificate keeps the old pair.
        let key = std::fs::read(folder.join("key.pem")).unwrap();
        std::fs::write(folder.join("key.pem"), "not a key").unwrap();
        picker.logs("the certificate in use stays").await;
        assert_eq!(health(picker.grpc, &old).await, Some(1));
        std::fs::write(folder.join("key.pem"), key).unwrap();

        let new = write("new.test");
        eventually("the new certificate", async || health(picker.grpc, &new).await).await;
        assert_eq!(health(picker.grpc, &old).await, None);
    });
}
