//! The words and numbers of reports.

use crate::metrics::{Metric, Unit};

/// A metric's name for people.
pub(crate) fn label(metric: Metric) -> &'static str {
    match metric {
        Metric::HitRate => "hits",
        Metric::FollowupHitRate => "follow-up hits",
        Metric::TtftMean => "TTFT mean",
        Metric::TtftP50 => "TTFT p50",
        Metric::TtftP95 => "TTFT p95",
        Metric::TtftP99 => "TTFT p99",
        Metric::E2eMean => "E2E mean",
        Metric::E2eP50 => "E2E p50",
        Metric::E2eP95 => "E2E p95",
        Metric::ItlMean => "ITL mean",
        Metric::Goodput => "goodput",
        Metric::SloMisses => "SLO misses",
        Metric::Failed => "failed",
        Metric::Imbalance => "imbalance",
        Metric::InFlight => "in flight",
        Metric::Avoidable => "avoidable",
        Metric::Redirects => "redirects",
        Metric::MovedAfterScale => "moved at scale-up",
        Metric::HitAfterScale => "hits after it",
        Metric::NewShare => "new endpoint's share",
        Metric::Preemptions => "preemptions",
        Metric::OutputTokensPerSecond => "output",
    }
}

/// The same with its unit.
pub(crate) fn title(metric: Metric) -> String {
    let name = label(metric);
    match metric.unit() {
        Unit::Seconds => format!("{name}, s"),
        Unit::Share => format!("{name}, %"),
        Unit::Rate => format!("{name}, tok/s"),
        Unit::Plain | Unit::Count => name.to_owned(),
    }
}

pub(crate) fn value(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => plain(value, 3),
        Unit::Share => format!("{:.1}", value * 100.0),
        Unit::Plain => format!("{value:.3}"),
        Unit::Count | Unit::Rate => format!("{value:.0}"),
    }
}

/// A number with so many significant digits, without an exponent.
pub(crate) fn plain(value: f64, digits: i32) -> String {
    if value == 0.0 || !value.is_finite() {
        return value.to_string();
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a logarithm of a float is between -324 and 308"
    )]
    let size = value.abs().log10().floor() as i32;
    let decimals = usize::try_from(digits - 1 - size).unwrap_or(0);
    format!("{value:.decimals$}")
}

pub(crate) fn bracketed(text: &str, lo: f64, hi: f64, write: impl Fn(f64) -> String) -> String {
    format!("{text} [{}, {}]", write(lo), write(hi))
}

pub(crate) fn marked(text: &str, best: bool) -> String {
    if best { format!("**{text}**") } else { text.to_owned() }
}
