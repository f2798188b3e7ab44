//! Compiles `proto/` without protoc. The messages are also the JSON of the decision log, hence serde.

/// Fields that are absent from JSON when they are absent from the message.
const OPTIONAL: &[&str] = &[
    "Record.conversation",
    "Record.placement",
    "Record.outcome",
    "Record.asked",
    "Record.expected_output",
    "Record.hot",
    "Record.scale",
    "Record.held_ms",
    "EndpointLoad.sight",
    "Asked.first_token_ns",
    "Asked.max_tokens",
    "Asked.prefix",
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
    "Step.score",
    "Step.kept",
    "Sight.held",
    "Sight.cold",
    "Sight.said",
    "Said.cached",
    "Said.waiting",
    "Said.running",
    "Said.memory",
    "Said.adapter",
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
/// The same of lists.
const LISTS: [&str; 3] = ["Step.terms", "Step.scores", "Asked.subset"];

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
    for field in LISTS {
        build = build.field_attribute(
            format!("llmring.v1.{field}"),
            "#[serde(skip_serializing_if = \"Vec::is_empty\")]",
        );
    }
    build.compile_fds(descriptors)?;
    Ok(())
}
