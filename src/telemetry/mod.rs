//! The only maker of records, log lines, spans and metrics about decisions.

mod engines;
pub mod explain;
pub mod init;
mod lines;
mod log;
pub mod metrics;
pub mod observer;
pub mod recall;
pub mod records;
pub mod source;
pub mod spans;

/// The messages of `proto/llmring/v1/decisions.proto`, which are also the JSON of the decision log.
#[expect(clippy::allow_attributes_without_reason, unused_qualifications, reason = "generated")]
pub mod pb {
    tonic::include_proto!("llmring.v1");
}
