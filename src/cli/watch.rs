//! `llm-ring watch`: follows a running picker over the decision service.

use std::io::Write as _;

use anyhow::Context as _;
use clap::Args;
use clap::builder::PossibleValuesParser;

use super::Output;
use crate::scheduling::Reason;
use crate::telemetry::{explain, pb};
use pb::decisions_client::DecisionsClient;

#[derive(Debug, Args)]
pub(super) struct Watch {
    /// The picker's health port
    #[arg(long, short, value_name = "URL", default_value = "http://127.0.0.1:9003")]
    address: String,
    /// Only this conversation
    #[arg(long, value_name = "ID")]
    conversation: Option<String>,
    /// Only requests that go to this endpoint
    #[arg(long, value_name = "NAME")]
    endpoint: Option<String>,
    /// Only decisions with this reason, such as `overflow`
    #[arg(long, value_name = "REASON", value_parser = PossibleValuesParser::new(Reason::ALL.map(Reason::as_str)))]
    reason: Option<String>,
    /// How to print; `json` is one record a line
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
}

impl Watch {
    pub(super) fn run(self) -> anyhow::Result<()> {
        tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(self.follow())
    }

    async fn follow(self) -> anyhow::Result<()> {
        let address = if self.address.contains("://") {
            self.address
        } else {
            format!("http://{}", self.address)
        };
        let mut client = DecisionsClient::connect(address.clone()).await.with_context(|| {
            format!("no picker answers at {address}; --address takes its health port")
        })?;
        let request = pb::WatchRequest {
            conversation: self.conversation.unwrap_or_default(),
            endpoint: self.endpoint.unwrap_or_default(),
            reason: self.reason.unwrap_or_default(),
        };
        let replies = client.watch(request).await.map_err(|status| {
            anyhow::anyhow!("{address} is not a picker's health port ({})", status.code())
        })?;
        let mut replies = replies.into_inner();
        eprintln!("following {address}");
        while let Some(reply) = replies
            .message()
            .await
            .map_err(|status| anyhow::anyhow!("the picker has gone ({})", status.code()))?
        {
            if reply.lost > 0 {
                eprintln!(
                    "({} records were lost: they came faster than they were read)",
                    reply.lost
                );
            }
            let Some(record) = reply.record else { continue };
            let text = match self.output {
                Output::Json => serde_json::to_string(&record)? + "\n",
                Output::Text => text(&record),
            };
            // A closed pipe is how a reader such as `head` says that it has enough.
            if std::io::stdout().write_all(text.as_bytes()).is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Writes a new decision whole, and an ended one as one line.
fn text(record: &pb::Record) -> String {
    let time = record.time.get(11..23).unwrap_or(&record.time);
    match &record.outcome {
        None => format!("{time}  {}", explain::render(record)),
        Some(outcome) => {
            let who =
                record.conversation.as_ref().map_or("", |conversation| conversation.id.as_str());
            format!(
                "{time}  ended: {} {who}: {}\n",
                record.target,
                explain::render_outcome(outcome)
            )
        }
    }
}
