//! Metrics of what is known of engines, read when they are asked for.

use std::sync::Arc;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

use super::metrics::EndpointLabel;
use crate::engine::knowledge::{Kept, Knowledge, Promises};
use crate::index::prefix::Stats;

/// Reads what is known of engines.
#[derive(Debug)]
pub(super) struct EngineCollector(pub(super) Arc<Knowledge>);

/// Label set of predictions.
#[derive(Debug, Clone, EncodeLabelSet)]
struct Prediction {
    endpoint: String,
    by: &'static str,
}

/// Label set of an index.
#[derive(Debug, Clone, EncodeLabelSet)]
struct Index {
    index: &'static str,
}

/// The predictions of an endpoint, by what they were made of.
fn kinds(kept: &Kept) -> [(&'static str, &Promises); 2] {
    [("events", &kept.told), ("text", &kept.guessed)]
}

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        let overview = self.0.overview();
        let mut scrapes = encoder.encode_descriptor(
            "engine_scrapes",
            "Times that an engine's metrics were heard",
            None,
            MetricType::Counter,
        )?;
        let asked = || overview.endpoints.iter().filter_map(|it| Some((it, it.metrics.as_ref()?)));
        for (known, status) in asked() {
            let label = EndpointLabel { endpoint: known.name.clone() };
            ConstCounter::new(status.scrapes).encode(scrapes.encode_family(&label)?)?;
        }
        let mut failing = encoder.encode_descriptor(
            "engine_scrape_failures",
            "Failures to hear an engine's metrics since they were last heard",
            None,
            MetricType::Gauge,
        )?;
        for (known, status) in asked() {
            let label = EndpointLabel { endpoint: known.name.clone() };
            ConstGauge::new(i64::from(status.failures)).encode(failing.encode_family(&label)?)?;
        }
        let mut fresh = encoder.encode_descriptor(
            "engine_metrics_fresh",
            "Whether what an engine's metrics said is believed (1) or too old or never heard (0)",
            None,
            MetricType::Gauge,
        )?;
        for (known, _) in asked() {
            let label = EndpointLabel { endpoint: known.name.clone() };
            ConstGauge::new(i64::from(known.fresh)).encode(fresh.encode_family(&label)?)?;
        }
        let mut tokens = |name: &str, help: &str, of: fn(&Promises) -> u64| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for known in &overview.endpoints {
                for (by, promises) in kinds(&known.kept) {
                    let label = Prediction { endpoint: known.name.clone(), by };
                    ConstCounter::new(of(promises)).encode(family.encode_family(&label)?)?;
                }
            }
            Ok::<_, std::fmt::Error>(())
        };
        tokens(
            "predicted_cached_tokens",
            "Prompt tokens predicted to be cached where the request went, by events or by text sent",
            |promises| promises.predicted,
        )?;
        tokens(
            "delivered_cached_tokens",
            "Those of the predicted tokens that the answer said were cached",
            |promises| promises.delivered,
        )?;
        let mut trust = encoder.encode_descriptor(
            "prediction_trust",
            "What predictions are multiplied by: delivered over predicted, of late",
            None,
            MetricType::Gauge,
        )?;
        for known in &overview.endpoints {
            for (by, promises) in kinds(&known.kept) {
                let label = Prediction { endpoint: known.name.clone(), by };
                let factor = promises.trust.factor();
                ConstGauge::new(factor).encode(trust.encode_family(&label)?)?;
            }
        }
        let indexes = [("events", &overview.told), ("text", &overview.text)];
        let mut held = |name: &str, help: &str, of: fn(&Stats) -> usize| {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (index, stats) in indexes {
                let value = i64::try_from(of(stats)).unwrap_or(i64::MAX);
                ConstGauge::new(value).encode(family.encode_family(&Index { index })?)?;
            }
            Ok::<_, std::fmt::Error>(())
        };
        held("prefix_blocks", "Blocks that an index holds", |stats| stats.blocks)?;
        held("prefix_bytes", "Bytes that an index takes of its budget", |stats| stats.bytes)?;
        let mut lost = encoder.encode_descriptor(
            "prefix_evicted_blocks",
            "Blocks that went so that an index stays within its budget",
            None,
            MetricType::Counter,
        )?;
        for (index, stats) in indexes {
            ConstCounter::new(stats.evicted).encode(lost.encode_family(&Index { index })?)?;
        }
        let (events, stream) = (&overview.events, &overview.events.stream);
        for (name, help, value) in [
            ("kv_connections", "Connections for KV events that were made", events.connected),
            ("kv_disconnections", "Connections for KV events that broke", events.disconnected),
            ("kv_refusals", "Connections for KV events that could not be made", events.refused),
            ("kv_batches", "Batches of KV events that were taken", stream.applied),
            ("kv_gaps", "Times that KV events were missing", stream.gaps),
            ("kv_replays", "Times that missing KV events were asked for again", stream.replays),
            ("kv_restarts", "Engines that KV events showed to have started again", stream.restarts),
            ("kv_clears", "Times that all that was known of a cache was dropped", stream.clears),
            (
                "kv_malformed",
                "Messages and KV events that could not be read",
                stream.malformed + stream.malformed_events,
            ),
            ("kv_unknown", "KV events of kinds that are not known", stream.unknown_events),
            (
                "kv_dropped",
                "Updates dropped since they could not be entered in time",
                events.dropped,
            ),
            (
                "kv_not_entered",
                "KV events that contradict themselves or the block size",
                overview.refused,
            ),
            (
                "kv_late",
                "Updates of engines that are no endpoints, or of an earlier connection",
                overview.late,
            ),
        ] {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(value).encode(metric)?;
        }
        Ok(())
    }
}
