//! A picker that cannot start says why, and what to do, and ends with 1.

use std::net::TcpListener;
use std::process::Command;

use crate::harness::picker::BINARY;
use crate::harness::process::{folder, output};

/// Runs `llm-ring serve` on a configuration and an endpoints file; it must end, and say all of this.
#[track_caller]
fn check(config: &str, arguments: &[&str], says: &[&str]) {
    let folder = folder("start");
    std::fs::write(folder.join("llm-ring.yaml"), config).unwrap();
    std::fs::write(folder.join("endpoints.yaml"), "endpoints: []\n").unwrap();
    std::fs::write(folder.join("broken.yaml"), "endpoints:\n- {name: a, adress: 1}\n").unwrap();
    let mut command = Command::new(BINARY);
    command.current_dir(&folder).args(["serve", "--config", "llm-ring.yaml"]).args(arguments);
    let (code, stdout, stderr) = output(&mut command);
    assert_eq!(code, Some(1), "{config:?} {arguments:?}: {stdout}{stderr}");
    for part in says {
        assert!(stderr.contains(part), "nothing of {part:?} in {stderr:?}");
    }
    assert!(!stderr.contains("panicked"), "{stderr}");
}

const ANY_PORT: &str =
    "server: { address: 127.0.0.1, grpc_port: 0, health_port: 0, metrics_port: 0 }\n";

#[test]
fn a_port_in_use_is_named_with_its_setting() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for (flag, key) in [
        ("--grpc-port", "server.grpc_port"),
        ("--grpc-health-port", "server.health_port"),
        ("--metrics-port", "server.metrics_port"),
    ] {
        let arguments = ["--endpoints", "endpoints.yaml", flag, &port.to_string()];
        check(ANY_PORT, &arguments, &[&format!("127.0.0.1:{port}"), key, "in use"]);
    }
}

#[test]
fn an_unknown_key_is_named_with_what_was_meant() {
    check("polices: {}\n", &[], &["llm-ring.yaml:1:1", "`polices`", "did you mean `polic"]);
    check("tls: { mod: off }\n", &[], &["llm-ring.yaml:1:", "`mod`", "did you mean `mode`"]);
}

#[test]
fn missing_endpoints_are_asked_for() {
    check(ANY_PORT, &[], &["no endpoints", "--endpoints", "endpoints.file"]);
    let missing = ["--endpoints", "nowhere.yaml"];
    check(ANY_PORT, &missing, &["nowhere.yaml", "cannot be read"]);
    let broken = ["--endpoints", "broken.yaml"];
    check(ANY_PORT, &broken, &["broken.yaml:2:", "did you mean `address`"]);
}

#[test]
fn a_tokenizer_that_cannot_be_loaded_is_named() {
    let config = |model: &str| format!("{ANY_PORT}tokenizers: {{ models: {{ mine: {model} }} }}\n");
    let endpoints = ["--endpoints", "endpoints.yaml"];
    let says = ["tokenizers.models", "`mine`", "nowhere/tokenizer.json", "no such file"];
    check(&config("{ folder: nowhere }"), &endpoints, &says);
    let wrong = config("{ folder: nowhere, dialect: vlm }");
    check(&wrong, &endpoints, &["llm-ring.yaml:2:", "`vlm`", "`vllm`"]);
}

#[test]
fn a_missing_certificate_is_named() {
    let config = format!("{ANY_PORT}tls: {{ mode: files, cert: no.pem, key: no.key }}\n");
    check(&config, &["--endpoints", "endpoints.yaml"], &["no.pem"]);
    check(ANY_PORT, &["--endpoints", "endpoints.yaml", "--tls", "files"], &["tls.cert", "tls.key"]);
}
