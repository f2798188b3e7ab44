//! `llm-ring explain`: makes a decision again, offline, and shows each number and step.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use serde::Deserialize as _;

use super::{Output, print};
use crate::config::{self, Config, Points};
use crate::ext_proc::request::{End, RequestReader};
use crate::pool::estimate::TokenEstimator;
use crate::pool::{Load, PoolSnapshot};
use crate::scheduling::{POLICIES, Scenario};
use crate::telemetry::{explain, pb, recall};
use crate::{app, discovery, yaml};

/// The policy and the parameters that the worked example compares with.
const EXAMPLE_BOUNDED: &str = "policies: { bounded: { load: tokens } }";

#[derive(Debug, Args)]
pub(super) struct Explain {
    /// A request file: a line of the decision log, its `decision` object, or the same by hand (YAML or JSON)
    #[arg(value_name = "FILE", required_unless_present_any = ["example", "body"], conflicts_with_all = ["example", "body"])]
    file: Option<PathBuf>,
    /// Work through the example of the documentation: a long conversation whose endpoint is busy
    #[arg(long, conflicts_with = "body")]
    example: bool,
    /// A request body as a client sends it, decided over the idle endpoints of --endpoints
    #[arg(long, value_name = "FILE", requires = "endpoints")]
    body: Option<PathBuf>,
    /// The path that the body was sent to
    #[arg(long, value_name = "PATH", default_value = "/v1/chat/completions")]
    path: String,
    /// Endpoints file, for --body
    #[arg(long, short, value_name = "FILE")]
    endpoints: Option<PathBuf>,
    /// Configuration with the policies' parameters
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Decide under this policy (again and again for several) instead of the recorded one
    #[arg(long, short, value_name = "NAME")]
    policy: Vec<String>,
    /// How to print
    #[arg(long, short, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(serde::Serialize)]
struct Decisions {
    decisions: Vec<pb::Record>,
}

impl Explain {
    pub(super) fn run(self) -> anyhow::Result<()> {
        let config = config::load(
            self.config.as_deref().map(config::File::read).transpose()?,
            &Vec::new(),
            &Vec::new(),
        )?
        .config;
        let (scenario, given) = if self.example {
            (Scenario::example(), pb::Record::default())
        } else if let (Some(body), Some(endpoints)) = (&self.body, &self.endpoints) {
            (body_scenario(body, &self.path, endpoints, &config)?, pb::Record::default())
        } else {
            let file = self.file.context("a request file is needed")?;
            let record = read_record(&file)?;
            (scenario(&record, &config).with_context(|| file.display().to_string())?, record)
        };
        let mut decisions = Vec::new();
        if self.example && self.policy.is_empty() {
            decisions.push(decide(&scenario, "llm-aware", &config)?);
            let tokens: Config = yaml::parse(EXAMPLE_BOUNDED).map_err(anyhow::Error::msg)?;
            decisions.push(decide(&scenario, "bounded", &tokens)?);
        } else if self.policy.is_empty() {
            let policy =
                if given.policy.is_empty() { config.policy.as_str() } else { &given.policy };
            decisions.push(decide(&scenario, policy, &config)?);
        } else {
            for policy in &self.policy {
                decisions.push(decide(&scenario, policy, &config)?);
            }
        }
        // What was recorded of the request, beside what is decided anew.
        for decision in &mut decisions {
            decision.time.clone_from(&given.time);
            decision.request_id.clone_from(&given.request_id);
            decision.trace_id.clone_from(&given.trace_id);
            decision.model.clone_from(&given.model);
        }
        match self.output {
            Output::Json => {
                print(&(serde_json::to_string_pretty(&Decisions { decisions })? + "\n"))
            }
            Output::Text => print_text(&decisions, &given, self.example),
        }
    }
}

fn print_text(decisions: &[pb::Record], given: &pb::Record, example: bool) -> anyhow::Result<()> {
    let mut out = String::new();
    if example {
        out.push_str(
            "Three replicas. A conversation of 860 tokens comes back for up to 48 more; llm-0 served it last\n\
             and has 820 of its tokens cached, but llm-0 is also the busiest. Move, or stay?\n\n",
        );
    }
    for (i, decision) in decisions.iter().enumerate() {
        if example && i == 1 && decision.policy == "bounded" {
            out.push_str("The same under plain bounded loads, counted in tokens, which know nothing of the cache:\n\n");
        }
        out.push_str(&explain::render(decision));
        out.push('\n');
    }
    if !given.target.is_empty() {
        let differs =
            decisions.iter().any(|d| d.policy == given.policy && d.target != given.target);
        out.push_str(&format!(
            "recorded: {} → {}   [{}]{}\n",
            given.policy,
            given.target,
            given.reason,
            if differs {
                "   differs: the policy's parameters were others; name them with --config"
            } else {
                ""
            }
        ));
    }
    if let Some(outcome) = &given.outcome {
        out.push_str(&format!("outcome:  {}\n", explain::render_outcome(outcome)));
    }
    print(&out)
}

fn decide(scenario: &Scenario, policy: &str, config: &Config) -> anyhow::Result<pb::Record> {
    let (name, policy) = config.policies.get(policy).with_context(|| {
        let known: Vec<&str> = POLICIES.iter().map(|&(name, _)| name).collect();
        yaml::unknown("policy", policy, &known)
    })?;
    Ok(explain::record(&scenario.decide(name, &*policy)?))
}

/// Reads a record, bare or in its log line, JSON or YAML.
fn read_record(file: &Path) -> anyhow::Result<pb::Record> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("{}: cannot be read", file.display()))?;
    let value: serde_yaml::Value = serde_yaml::from_str(&text)
        .with_context(|| format!("{}: neither JSON nor YAML", file.display()))?;
    // A line of the log, or what `explain --output json` printed.
    let inner = value.get("decision").or_else(|| value.get("decisions")?.get(0)).cloned();
    match inner {
        Some(inner) => pb::Record::deserialize(inner)
            .with_context(|| format!("{}: its `decision` is no decision", file.display())),
        None => yaml::parse(&text).map_err(|error| anyhow::anyhow!("{}:{error}", file.display())),
    }
}

/// Reads what a record's decision was made on.
fn scenario(record: &pb::Record, config: &Config) -> anyhow::Result<Scenario> {
    let points = match record.ring_points {
        0 => Config::default().ring.points,
        points => Points::try_from(u64::from(points))
            .map_err(anyhow::Error::msg)
            .context("ring_points")?,
    };
    let scenario = recall::scenario(record, points.get())?;
    Ok(Scenario { prices: (&config.prices).into(), ..scenario })
}

/// Reads a body as the picker does and sets it before idle endpoints.
fn body_scenario(
    body: &Path,
    path: &str,
    endpoints: &Path,
    config: &Config,
) -> anyhow::Result<Scenario> {
    let bytes =
        std::fs::read(body).with_context(|| format!("{}: cannot be read", body.display()))?;
    let points = config.ring.points.get();
    let pool = PoolSnapshot::new(
        0,
        discovery::file::read(endpoints).map_err(anyhow::Error::msg)?,
        points,
    )?;
    let mut reader = RequestReader::new(path.as_bytes(), None, None, &app::exchange(config).read);
    reader.push(&bytes);
    let reading = reader.reading(End::Whole);
    Ok(Scenario {
        endpoints: pool
            .endpoints()
            .iter()
            .map(|endpoint| (endpoint.clone(), Load::default()))
            .collect(),
        ring_points: points,
        conversation: crate::ext_proc::exchange::body_conversation(&reading),
        prompt_tokens: TokenEstimator::default()
            .estimate(reading.model.as_deref(), &reading.prompt(), None)
            .tokens,
        max_tokens: reading.max_tokens.unwrap_or(config.load.default_max_tokens),
        placed: None,
        sequence: 0,
        seed: 0,
        destinations: config.answers.destinations,
        sights: Vec::new(),
        output: 100.0,
        hot: 0.0,
        scale: 1.0,
        prices: (&config.prices).into(),
    })
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::pool::{Adapters, Conversation, Endpoint, InferenceRequest, KeySource, PromptSize};
    use crate::scheduling::{Detail, Evidence, Moment, Scheduler};

    /// Decides once in production and once more from the record of it, as JSON.
    #[track_caller]
    fn check(parameters: &str, policy: &str) {
        let config: Config =
            yaml::parse(&format!("policy: {policy}\npolicies: {{ {policy}: {parameters} }}"))
                .unwrap();
        let endpoint =
            |n: u8| Endpoint::new(format!("llm-{n}"), SocketAddr::from(([10, 0, 0, n], 8000)));
        let pool = PoolSnapshot::new(0, (0..5).map(endpoint).collect(), 100).unwrap();
        let scheduler = Arc::new(Scheduler::new(app::settings(&config).unwrap(), Arc::new(pool)));
        let adapters = |active: &str| {
            Some(Adapters { active: vec![active.to_owned()], waiting: Vec::new(), most: 1 })
        };
        let evidence = Evidence {
            cached: &[Some(700), None, Some(0), Some(1200), None],
            coming: &[Some(900), None, Some(0), Some(1200), None],
            memory: &[Some(0.5), Some(0.1), None, Some(0.9), None],
            waiting: &[Some(3), None, Some(1), Some(0), None],
            running: &[Some(30), Some(2), None, Some(7), None],
            adapters: &[adapters("a"), adapters("b"), None, adapters("a"), None],
            ..Evidence::default()
        };
        let mut bookings = Vec::new();
        for turn in 0..40u64 {
            let name = format!("c{}", turn % 7);
            let request = InferenceRequest {
                conversation: (turn % 5 != 0)
                    .then(|| Conversation::named(name, KeySource::Field("prompt_cache_key"))),
                model: Some("a".to_owned()),
                prompt: PromptSize { token_ids: 40 * turn, ..PromptSize::default() },
                ..InferenceRequest::default()
            };
            let evidence = if turn % 3 == 0 { Evidence::default() } else { evidence };
            let now = Duration::from_millis(turn * 100);
            let moment = Moment {
                now,
                seed: turn.wrapping_mul(0x9e37_79b9_7f4a_7c15),
                evidence,
                prefix: Some(turn % 4),
                held: Duration::ZERO,
            };
            let (decision, mut booking) =
                scheduler.schedule(&request, moment, Detail::Full).unwrap();
            let record = explain::record(&decision);
            let text = serde_json::to_string(&record).unwrap();
            let read: pb::Record = yaml::parse(&text).unwrap();
            let again = decide(&scenario(&read, &config).unwrap(), policy, &config).unwrap();
            assert_eq!(
                (&again.target, &again.reason, again.cached_tokens, &again.steps),
                (&record.target, &record.reason, record.cached_tokens, &record.steps),
                "{policy} {parameters}, decision {turn}"
            );
            if turn % 2 == 0 {
                booking.first_token(now);
            }
            bookings.push(booking);
        }
    }

    #[test]
    fn a_decision_is_made_again_from_its_record() {
        for (policy, _) in POLICIES {
            check("{}", policy);
        }
        for profile in ["optimized-baseline", "guide", "precise"] {
            check(&format!("{{ profile: {profile} }}"), "weighted");
        }
        check(
            "{ scorers: [{type: lora-affinity-scorer}, {type: running-requests-size-scorer}, \
             {type: active-request-scorer}, {type: load-aware-scorer}], picker: weighted-random-picker }",
            "weighted",
        );
        check("{ session: true, beta: 0.2 }", "load-aware");
    }
}
