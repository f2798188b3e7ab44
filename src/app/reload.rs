//! The configuration's file, followed while the picker runs: the policy and its parameters change without a restart,
//! whatever they are. Everything else is of the start, and a change of it is said.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use serde_yaml::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::{Config, Origin};
use crate::scheduling::Scheduler;

/// How often the file is looked at.
const INTERVAL: Duration = Duration::from_secs(1);

/// What follows the file.
#[derive(Debug)]
pub(super) struct Reload {
    /// What is in force.
    config: Config,
    origin: Option<Origin>,
    scheduler: Arc<Scheduler>,
    hangup: Signal,
}

impl Reload {
    /// Listens for SIGHUP from now on, which would otherwise end the process.
    ///
    /// # Errors
    /// There are no signals.
    pub(super) fn new(
        config: &Config,
        origin: Option<Origin>,
        scheduler: Arc<Scheduler>,
    ) -> anyhow::Result<Self> {
        let hangup = signal(SignalKind::hangup()).context("no signals")?;
        Ok(Self { config: config.clone(), origin, scheduler, hangup })
    }

    /// Takes over what the file says when it changes, and at once on SIGHUP, for as long as the picker runs.
    pub(super) async fn follow(mut self) {
        let Some(origin) = self.origin.clone() else {
            while self.hangup.recv().await.is_some() {
                tracing::warn!("SIGHUP: there is no configuration file to read again");
            }
            return;
        };
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let read =
            async || tokio::fs::read_to_string(&origin.path).await.map_err(|it| it.to_string());
        // What was read for the start is not known here; it is looked at once more, and says nothing new.
        let (mut taken, mut last) = (None, None);
        loop {
            let asked = tokio::select! {
                _ = ticks.tick() => false,
                _ = self.hangup.recv() => true,
            };
            let now = Some(read().await);
            // A writer that truncates leaves an empty file for a moment: a change counts when it has been seen twice.
            let settled = now == last && now != taken;
            last.clone_from(&now);
            if asked || settled {
                taken.clone_from(&now);
                if let Some(text) = now {
                    self.take(&origin, text, asked);
                }
            }
        }
    }

    /// Takes over a text of the file; one that is wrong changes nothing.
    fn take(&mut self, origin: &Origin, text: Result<String, String>, asked: bool) {
        let file = origin.path.display();
        let config = text
            .map_err(|error| format!("{file}: cannot be read: {error}"))
            .and_then(|text| origin.load(text).map_err(|error| error.to_string()));
        let config = match config {
            Ok(config) => config,
            Err(error) => {
                tracing::warn!(error, "the configuration in use stays");
                return;
            }
        };
        let others = differing(&self.config, &config);
        if !others.is_empty() {
            let keys = others.join(", ");
            tracing::warn!(file = %file, keys, "these changes need a restart");
        }
        let before = parameters(&self.config);
        let after = parameters(&config);
        self.config.policies.clone_from(&config.policies);
        self.config.policy.clone_from(&config.policy);
        if before == after {
            if asked {
                tracing::info!(file = %file, policy = after.0, "read again: the policy is the same");
            }
            return;
        }
        if let Some((name, policy)) = config.policies.get(config.policy.as_str()) {
            self.scheduler.set_policy(name, policy);
            let (parameters, before) = (after.1, before.0);
            tracing::info!(file = %file, policy = name, parameters, before, "the policy has changed");
        }
    }
}

/// Returns the policy in use and its parameters, as text.
fn parameters(config: &Config) -> (String, String) {
    let name = config.policy.as_str();
    let all = serde_json::to_value(&config.policies).unwrap_or_default();
    (name.to_owned(), all.get(name).map(ToString::to_string).unwrap_or_default())
}

/// Returns the sections that differ, but for the policy and its parameters.
fn differing(before: &Config, after: &Config) -> Vec<String> {
    let section = |config| serde_yaml::to_value(config).unwrap_or_default();
    let (before, after): (Value, Value) = (section(before), section(after));
    let sections = after.as_mapping().into_iter().flatten();
    sections
        .filter(|(key, value)| before.get(*key) != Some(*value))
        .filter_map(|(key, _)| key.as_str())
        .filter(|key| !matches!(*key, "policy" | "policies"))
        .map(str::to_owned)
        .collect()
}
