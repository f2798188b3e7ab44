//! The settings of what is known of engines.

use std::hash::{BuildHasher as _, RandomState};
use std::time::Duration;

use anyhow::Context as _;

use crate::config::{Config, MetricsTls};
use crate::engine::{follow, knowledge, kv_subscribe, scrape};

/// Says what is to be known.
pub(super) fn knowledge(config: &Config) -> knowledge::Settings {
    let prefix = &config.prefix;
    knowledge::Settings {
        metrics: config.metrics.enabled,
        events: config.events.enabled,
        text: prefix.text,
        block_bytes: prefix.block_bytes.get(),
        block_tokens: prefix.block_tokens.get(),
        budget: usize::try_from(u64::from(prefix.budget_bytes)).unwrap_or(usize::MAX),
        capacity_tokens: prefix.capacity_tokens.into(),
        speculation: milliseconds(prefix.speculation_ms.get()),
        seed: RandomState::new().hash_one(0),
    }
}

/// Says how engines are heard.
///
/// # Errors
/// The settings contradict themselves.
pub(super) fn following(config: &Config) -> anyhow::Result<follow::Settings> {
    let metrics = config.metrics.enabled.then(|| metrics(config)).transpose()?;
    let events = config.events.enabled.then(|| events(config)).transpose()?;
    Ok(follow::Settings { metrics, events })
}

fn metrics(config: &Config) -> anyhow::Result<scrape::Settings> {
    let metrics = &config.metrics;
    let trust = match metrics.tls {
        MetricsTls::Off => None,
        MetricsTls::Any => Some(scrape::Trust::Anything),
        MetricsTls::Verify => {
            let ca = metrics.ca.clone();
            Some(scrape::Trust::Ca(
                ca.context("metrics.tls is `verify`, so metrics.ca must name a PEM file")?,
            ))
        }
    };
    let server_name = metrics.server_name.clone();
    Ok(scrape::Settings {
        interval: milliseconds(metrics.interval_ms.get()),
        stale_after: milliseconds(metrics.stale_ms.get()),
        timeout: milliseconds(metrics.timeout_ms.get()),
        most_bytes: usize::try_from(u64::from(metrics.max_bytes)).unwrap_or(usize::MAX),
        tls: trust.map(|trust| scrape::Tls { trust, server_name }),
        port: metrics.port,
        path: metrics.path.clone(),
        token_file: metrics.token_file.clone(),
    })
}

fn events(config: &Config) -> anyhow::Result<follow::Events> {
    let events = &config.events;
    let ranks = events.ranks.get();
    for (key, port) in [("port", Some(events.port)), ("replay_port", events.replay_port)] {
        anyhow::ensure!(
            port.is_none_or(|port| u32::from(port) + ranks - 1 <= u32::from(u16::MAX)),
            "events.{key} of the last of {ranks} ranks is above 65535"
        );
    }
    Ok(follow::Events {
        port: events.listen.is_none().then_some(events.port),
        replay_port: events.replay_port,
        ranks,
        listen: events.listen,
        subscriber: kv_subscribe::Settings {
            topic_prefix: events.topic.clone(),
            ..kv_subscribe::Settings::default()
        },
    })
}

fn milliseconds(number: u32) -> Duration {
    Duration::from_millis(number.into())
}
