//! Compiles `proto/` without protoc. The messages are also the JSON of the decision log, hence serde.

/// Fields that are absent from JSON when they are absent from the message.
const OPTIONAL: [&str; 26] = [
    "Record.conversation",
    "Record.placement",
    "Record.outcome",
    "Record.expected_output",
    "Record.hot",
    "EndpointLoad.sight",
    "Step.endpoint",
    "Step.load",
    "Step.new_tokens",
    "Step.cost",
    "Step.total",
    "Step.average",
    "Step.epsilon",
    "Step.cap",
    "Step.unit",
    "Step.verdict",
    "Step.cached",
    "Step.threshold",
    "Step.seconds",
    "Outcome.status",
    "Outcome.ttft_ms",
    "Outcome.prompt_tokens",
    "Outcome.completion_tokens",
    "Outcome.cached_tokens",
    "Outcome.served",
    "WatchReply.record",
];
/// Texts that are absent from JSON when they are empty.
const EMPTY: [&str; 5] =
    ["Record.request_id", "Record.trace_id", "Record.refusal", "Record.model", "Record.body"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=proto");
    let descriptors = protox::compile(["llmring/v1/decisions.proto"], ["proto"])?;
    let mut build = tonic_prost_build::configure().type_attribute(
        ".",
        "#[derive(serde::Serialize, serde::Deserialize)] #[serde(default, deny_unknown_fields)]",
    );
    for field in OPTIONAL {
        build = build.field_attribute(
            format!("llmring.v1.{field}"),
            "#[serde(skip_serializing_if = \"Option::is_none\")]",
        );
    }
    for field in EMPTY {
        build = build.field_attribute(
            format!("llmring.v1.{field}"),
            "#[serde(skip_serializing_if = \"String::is_empty\")]",
        );
    }
    // The same of a list.
    build = build.field_attribute(
        "llmring.v1.Step.terms",
        "#[serde(skip_serializing_if = \"Vec::is_empty\")]",
    );
    build.compile_fds(descriptors)?;
    Ok(())
}
