//! Records read back into what decisions are made on.

use std::net::SocketAddr;
use std::num::NonZeroUsize;

use anyhow::Context as _;

use super::pb;
use crate::pool::{
    AdapterState, Conversation, Ending, Endpoint, InferenceRequest, KeySource, Load, Outcome,
    Prices, PromptSize, Said, Sight, Usage, endpoint,
};
use crate::scheduling::Scenario;

/// Returns one decision on its own, as it was recorded, over a ring of so many points for each unit of weight.
///
/// # Errors
/// Nothing was chosen, the record has no loads, or something in it cannot be read.
pub fn scenario(record: &pb::Record, points: u32) -> anyhow::Result<Scenario> {
    anyhow::ensure!(
        record.refusal.is_empty() || !record.target.is_empty(),
        "the request was refused ({}); nothing was chosen",
        record.refusal
    );
    anyhow::ensure!(
        !record.loads.is_empty(),
        "it has no `loads`, so there is nothing to choose from; records of large pools have them with log.full_detail"
    );
    let endpoints = (1u16..)
        .zip(&record.loads)
        .map(|(i, load)| {
            let address = if load.address.is_empty() {
                SocketAddr::from(([127, 0, 0, 1], i))
            } else {
                load.address.parse().with_context(|| format!("`{}` is no ip:port", load.address))?
            };
            let endpoint = Endpoint {
                weight: match load.weight {
                    0.0 => 1.0,
                    weight => endpoint::weight(weight)
                        .map_err(anyhow::Error::msg)
                        .with_context(|| load.name.clone())?,
                },
                ..Endpoint::new(load.name.clone(), address)
            };
            Ok((
                endpoint,
                Load {
                    requests: load.requests.max(u64::from(load.tokens > 0)),
                    tokens: load.tokens,
                },
            ))
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    let sights = record.loads.iter();
    let sights = sights.filter_map(|load| Some((load.name.clone(), sight(load.sight.as_ref()?))));
    Ok(Scenario {
        endpoints,
        ring_points: points,
        conversation: conversation(record)?,
        prompt_tokens: record.prompt_tokens,
        max_tokens: record.max_tokens,
        placed: record
            .placement
            .as_ref()
            .map(|placed| (placed.endpoint.clone(), placed.cached_tokens)),
        sequence: record.sequence,
        seed: hash(&record.seed).context("seed")?.unwrap_or(0),
        destinations: NonZeroUsize::new(record.destinations.len()).unwrap_or(NonZeroUsize::MIN),
        sights: sights.collect(),
        output: record.expected_output.unwrap_or(100.0),
        hot: record.hot.unwrap_or(0.0),
        scale: record.scale.unwrap_or(1.0),
        prices: Prices::default(),
    })
}

/// Returns what an engine said of itself.
fn said(said: &pb::Said) -> Said {
    let state = |name: &str| {
        AdapterState::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, state)| state)
    };
    Said {
        cached: said.cached,
        waiting: said.waiting,
        running: said.running,
        memory: said.memory,
        adapter: said.adapter.as_deref().and_then(state),
    }
}

/// Returns the conversation of a record, under the place on the ring that it had.
///
/// # Errors
/// Its key is no hash.
pub fn conversation(record: &pb::Record) -> anyhow::Result<Option<Conversation>> {
    let Some(given) = &record.conversation else { return Ok(None) };
    let source = if given.source.is_empty() { "the file" } else { &given.source };
    let named = Conversation::named(given.id.clone(), KeySource::Header(source.to_owned()));
    let key = hash(&given.key).context("conversation.key")?.unwrap_or(named.key);
    Ok(Some(Conversation { key, ..named }))
}

/// Returns the request of a record. Its objective is named after its priority, where it had one.
///
/// # Errors
/// Something in it cannot be read.
pub fn request(record: &pb::Record, asked: &pb::Asked) -> anyhow::Result<InferenceRequest> {
    // Sums over what no body can hold do not fit.
    let size = |of: u64| of.min(1 << 40);
    let subset = asked.subset.iter().map(|address| {
        address.parse::<SocketAddr>().with_context(|| format!("`{address}` is no ip:port"))
    });
    let subset = subset.collect::<anyhow::Result<Vec<_>>>()?;
    Ok(InferenceRequest {
        text: None,
        salt: None,
        id: record.request_id.clone(),
        conversation: conversation(record)?,
        model: Some(record.model.clone()).filter(|model| !model.is_empty()),
        objective: (record.priority != 0).then(|| record.priority.to_string()),
        prompt: PromptSize {
            text_bytes: size(asked.text_bytes),
            messages: size(asked.messages),
            token_ids: size(asked.token_ids),
            exact: asked.exact_tokens.map(size),
            media: size(asked.media),
            unread: asked.unread,
        },
        tokens: None,
        max_tokens: asked.max_tokens,
        subset: Some(subset).filter(|subset| !subset.is_empty()),
    })
}

/// Returns the outcome of a record.
///
/// # Errors
/// Something in it cannot be read.
pub fn outcome(outcome: &pb::Outcome) -> anyhow::Result<Outcome> {
    let ending = match outcome.ending.as_str() {
        "complete" => Ending::Complete,
        "unobserved" => Ending::Unobserved,
        "aborted" => Ending::Aborted,
        other => anyhow::bail!("`{other}` is no ending"),
    };
    let served = outcome.served.as_ref().map(|address| {
        address.parse::<SocketAddr>().with_context(|| format!("`{address}` is no ip:port"))
    });
    Ok(Outcome {
        ending,
        status: outcome.status.map(u16::try_from).transpose().context("status")?,
        served: served.transpose()?,
        usage: Usage {
            prompt_tokens: outcome.prompt_tokens,
            completion_tokens: outcome.completion_tokens,
            cached_tokens: outcome.cached_tokens,
            response_id: None,
        },
    })
}

/// Reads what was seen of an engine.
#[must_use]
pub fn sight(seen: &pb::Sight) -> Sight {
    Sight {
        backlog: seen.backlog,
        waiting: seen.waiting,
        answers: seen.answers,
        contexts: seen.contexts,
        balance: seen.balance,
        prompt_pace: seen.prompt_pace,
        answer_pace: seen.answer_pace,
        cached: seen.cached,
        memory: seen.memory,
        stuck: seen.stuck,
        // Older records have what is cached and what will be in one.
        held: seen.held.unwrap_or(seen.cached),
        uncached: seen.uncached,
        cold: seen.cold,
        said: seen.said.as_ref().map(said).unwrap_or_default(),
    }
}

/// Reads 16 hex digits, or nothing.
///
/// # Errors
/// It is something else.
pub fn hash(text: &str) -> anyhow::Result<Option<u64>> {
    if text.is_empty() {
        return Ok(None);
    }
    u64::from_str_radix(text, 16)
        .map(Some)
        .with_context(|| format!("`{text}` is no hash of 16 hex digits"))
}
