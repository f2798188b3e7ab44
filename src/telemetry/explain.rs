//! A decision as a record for machines and as text for a person; one of them is made from the other, so that the
//! log, `explain` and `watch` can never disagree.

use std::fmt::Write as _;

use super::pb;
use crate::pool::{Ending, InferenceRequest, KeySource, Outcome, Said, Sight};
use crate::scheduling::decision::{Gate, Verdict};
use crate::scheduling::{Decision, Moment, Score, Step, Trace};

/// Makes the record of a decision; the caller adds what only it knows: time, request id, trace id.
#[must_use]
pub fn record(decision: &Decision) -> pb::Record {
    let name = |slot: u32| decision.pool.endpoint(slot).name.as_str();
    let steps = decision.trace.steps.iter().map(|step| step_of(step, &name)).collect();
    pb::Record { steps, ..facts(decision) }
}

/// The same without the steps, which follow from the rest.
#[must_use]
pub fn facts(decision: &Decision) -> pb::Record {
    let trace = &decision.trace;
    let name = |slot: u32| decision.pool.endpoint(slot).name.as_str();
    pb::Record {
        policy: decision.policy.to_owned(),
        reason: decision.reason.as_str().to_owned(),
        target: name(decision.target()).to_owned(),
        destinations: decision
            .targets
            .iter()
            .map(|&slot| decision.pool.endpoint(slot).address.to_string())
            .collect(),
        cached_tokens: decision.cached,
        pool_version: decision.pool.version(),
        ring_points: decision.pool.ring_points(),
        loads: trace
            .loads
            .iter()
            .map(|&(slot, load)| {
                let endpoint = decision.pool.endpoint(slot);
                pb::EndpointLoad {
                    name: endpoint.name.clone(),
                    address: endpoint.address.to_string(),
                    weight: endpoint.weight,
                    requests: load.requests,
                    tokens: load.tokens,
                    sight: trace
                        .sights
                        .iter()
                        .find(|(seen, _)| *seen == slot)
                        .map(|(_, it)| sight(it)),
                }
            })
            .collect(),
        placement: trace.placed.map(|(slot, cached)| pb::Placement {
            endpoint: name(slot).to_owned(),
            cached_tokens: cached,
        }),
        ..shared(trace)
    }
}

fn sight(sight: &Sight) -> pb::Sight {
    pb::Sight {
        backlog: sight.backlog,
        waiting: sight.waiting,
        answers: sight.answers,
        contexts: sight.contexts,
        balance: sight.balance,
        prompt_pace: sight.prompt_pace,
        answer_pace: sight.answer_pace,
        cached: sight.cached,
        memory: sight.memory,
        stuck: sight.stuck,
        held: Some(sight.held),
        uncached: sight.uncached,
        cold: sight.cold,
        said: (sight.said != Said::default()).then(|| pb::Said {
            cached: sight.said.cached,
            waiting: sight.said.waiting,
            running: sight.said.running,
            memory: sight.said.memory,
            adapter: sight.said.adapter.map(|state| state.as_str().to_owned()),
        }),
    }
}

/// Makes the parts of a record that do not depend on a choice.
fn shared(trace: &Trace) -> pb::Record {
    let (tokens_per_byte, estimate_answers) = trace.estimate.unwrap_or_default();
    let looked = !trace.sights.is_empty();
    pb::Record {
        conversation: trace.conversation.as_ref().map(|(id, source)| pb::Conversation {
            id: id.clone(),
            source: source_name(source).to_owned(),
            key: hex(trace.key),
        }),
        model: trace.model.clone().unwrap_or_default(),
        priority: trace.priority,
        expected_output: looked.then_some(trace.output),
        hot: looked.then_some(trace.hot),
        scale: looked.then_some(trace.scale),
        held_ms: (!trace.held.is_zero()).then(|| tenth(trace.held.as_secs_f64() * 1e3)),
        prompt_tokens: trace.prompt_tokens,
        max_tokens: trace.max_tokens,
        tokens_per_byte,
        estimate_answers,
        endpoints: count(trace.endpoints),
        candidates: count(trace.candidates),
        sequence: trace.sequence,
        seed: hex(trace.seed),
        ..pb::Record::default()
    }
}

/// Names where a conversation's identity was found.
#[must_use]
pub fn source_name(source: &KeySource) -> &str {
    match source {
        KeySource::Header(name) => name,
        KeySource::Field(name) => name,
        KeySource::PreviousResponse => "previous_response_id",
        KeySource::Opening => "opening",
    }
}

/// Makes what a recording holds of a request beside its decision; the caller adds when its answer came.
#[must_use]
pub fn asked(request: &InferenceRequest, moment: &Moment<'_>) -> pb::Asked {
    let prompt = &request.prompt;
    pb::Asked {
        text_bytes: prompt.text_bytes,
        messages: prompt.messages,
        token_ids: prompt.token_ids,
        exact_tokens: prompt.exact,
        media: prompt.media,
        unread: prompt.unread,
        max_tokens: request.max_tokens,
        subset: request.subset.iter().flatten().map(ToString::to_string).collect(),
        prefix: moment.prefix.map(hex),
        ..pb::Asked::default()
    }
}

/// Makes the record of an outcome.
#[must_use]
pub fn outcome(outcome: &Outcome, ttft_ms: Option<f64>, duration_ms: f64) -> pb::Outcome {
    pb::Outcome {
        ending: ending_name(outcome.ending).to_owned(),
        status: outcome.status.map(u32::from),
        ttft_ms: ttft_ms.map(tenth),
        duration_ms: tenth(duration_ms),
        prompt_tokens: outcome.usage.prompt_tokens,
        completion_tokens: outcome.usage.completion_tokens,
        cached_tokens: outcome.usage.cached_tokens,
        served: outcome.served.map(|address| address.to_string()),
    }
}

/// Names how a stream ended.
#[must_use]
pub fn ending_name(ending: Ending) -> &'static str {
    match ending {
        Ending::Complete => "complete",
        Ending::Unobserved => "unobserved",
        Ending::Aborted => "aborted",
    }
}

/// Writes a record as a person reads it.
#[must_use]
pub fn render(record: &pb::Record) -> String {
    let mut out = String::new();
    let _ = if record.refusal.is_empty() {
        writeln!(out, "{} → {}   [{}]", record.policy, record.target, record.reason)
    } else {
        writeln!(out, "refused: {}", record.refusal)
    };
    if let Some(conversation) = &record.conversation {
        let _ = writeln!(out, "  conversation  {} (from {})", conversation.id, conversation.source);
    }
    if record.max_tokens > 0 || record.prompt_tokens > 0 {
        let _ = writeln!(
            out,
            "  request       prompt {} tokens{}, at most {} to generate: {} in full",
            record.prompt_tokens,
            estimate_note(record),
            record.max_tokens,
            record.prompt_tokens.saturating_add(record.max_tokens)
        );
    }
    if !record.loads.is_empty() {
        let loads: Vec<String> = record
            .loads
            .iter()
            .map(|load| {
                let weight = if load.weight == 1.0 {
                    String::new()
                } else {
                    format!(" × weight {}", load.weight)
                };
                format!(
                    "{} {} tokens in {} requests{weight}",
                    load.name, load.tokens, load.requests
                )
            })
            .collect();
        let _ = writeln!(out, "  load before   {}", loads.join(" · "));
    }
    if record.candidates < record.endpoints {
        let _ = writeln!(
            out,
            "  candidates    {} of {} endpoints",
            record.candidates, record.endpoints
        );
    }
    for (i, step) in (1..).zip(&record.steps) {
        let _ = writeln!(out, "  {i:>2}. {}", step.text);
    }
    if let [_, fallbacks @ ..] = record.destinations.as_slice()
        && !fallbacks.is_empty()
    {
        let _ = writeln!(out, "  then          {}", fallbacks.join(", "));
    }
    if let Some(outcome) = &record.outcome {
        let _ = writeln!(out, "  outcome       {}", render_outcome(outcome));
    }
    out
}

/// Writes an outcome in one line.
#[must_use]
pub fn render_outcome(outcome: &pb::Outcome) -> String {
    let mut line =
        outcome.status.map_or_else(|| "no answer".to_owned(), |status| status.to_string());
    if outcome.ending != "complete" {
        let _ = write!(line, " ({})", outcome.ending);
    }
    if let Some(ttft) = outcome.ttft_ms {
        let _ = write!(line, ", first token after {ttft} ms");
    }
    let _ = write!(line, ", {} ms in all", outcome.duration_ms);
    if let Some(prompt) = outcome.prompt_tokens {
        let cached = outcome
            .cached_tokens
            .map_or_else(String::new, |cached| format!(", {cached} of them cached"));
        let _ = write!(line, ", prompt {prompt} tokens{cached}");
    }
    line
}

fn estimate_note(record: &pb::Record) -> String {
    match (record.tokens_per_byte > 0.0, record.estimate_answers) {
        (false, _) => String::new(),
        (true, 0) => format!(" (estimated, {} a byte)", record.tokens_per_byte),
        (true, answers) => {
            format!(
                " (estimated, {} a byte from {answers} answers)",
                (record.tokens_per_byte * 1000.0).round() / 1000.0
            )
        }
    }
}

/// Writes seconds so that small ones can be told apart.
fn time(seconds: f64) -> String {
    if seconds < 1.0 { format!("{:.3} ms", seconds * 1000.0) } else { format!("{seconds:.3} s") }
}

fn step_of<'a>(step: &Step, name: &dyn Fn(u32) -> &'a str) -> pb::Step {
    let named =
        |step: &str, text: String| pb::Step { step: step.to_owned(), text, ..pb::Step::default() };
    match step {
        Step::Remembered { endpoint, cached, home } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            cached: Some(*cached),
            ..named(
                "placement",
                format!(
                    "placement memory: last served by {}, {cached} tokens cached there{}",
                    name(*endpoint),
                    if *home { ", which is also its home" } else { "" }
                ),
            )
        },
        Step::NotRemembered => {
            named("placement", "placement memory: none, a new conversation".to_owned())
        }
        Step::MemoryOff => named("placement", "placement memory: off".to_owned()),
        Step::Cost { endpoint, new_tokens, max_tokens, cost, unit } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            new_tokens: Some(*new_tokens),
            cost: Some(*cost),
            unit: Some(unit.as_str().to_owned()),
            ..named(
                "cost",
                match unit {
                    crate::scheduling::Unit::Requests => {
                        format!("cost on {}: 1 request", name(*endpoint))
                    }
                    crate::scheduling::Unit::Tokens => format!(
                        "cost on {}: {new_tokens} new + {max_tokens} to generate = {cost} tokens",
                        name(*endpoint)
                    ),
                },
            )
        },
        Step::CostElsewhere { new_tokens, max_tokens, cost, unit } => pb::Step {
            new_tokens: Some(*new_tokens),
            cost: Some(*cost),
            unit: Some(unit.as_str().to_owned()),
            ..named(
                "cost-elsewhere",
                format!(
                    "cost elsewhere: {new_tokens} new + {max_tokens} to generate = {cost} {}",
                    unit.as_str()
                ),
            )
        },
        Step::Capacity { total, average, epsilon, cap, floor, unit } => pb::Step {
            total: Some(*total),
            average: Some(tenth(*average)),
            epsilon: Some(*epsilon),
            cap: Some(tenth(*cap)),
            unit: Some(unit.as_str().to_owned()),
            ..named(
                "capacity",
                format!(
                    "with it the load is {total} {}, average {}, cap {} ({})",
                    unit.as_str(),
                    tenth(*average),
                    tenth(*cap),
                    match floor {
                        Some(floor) => format!("the floor of {floor}, above ε = {epsilon}"),
                        None => format!("ε = {epsilon}"),
                    }
                ),
            )
        },
        Step::LongApplies { long_epsilon, cap, floor } => pb::Step {
            epsilon: Some(*long_epsilon),
            cap: Some(tenth(*cap)),
            ..named(
                "long",
                format!(
                    "long stickiness: a long cached conversation, cap {} ({}long ε = {long_epsilon})",
                    tenth(*cap),
                    if *floor { "the floor, above " } else { "" }
                ),
            )
        },
        Step::LongTooShort { prompt_tokens, threshold } => pb::Step {
            threshold: Some(*threshold),
            ..named(
                "long",
                format!(
                    "long stickiness: no, the prompt of {prompt_tokens} tokens is under the threshold of {threshold}"
                ),
            )
        },
        Step::LongNotCached => {
            named("long", "long stickiness: no, nothing is known to be cached".to_owned())
        }
        Step::LongOff => named("long", "long stickiness: off".to_owned()),
        Step::Tested { endpoint, load, cost, cap, weight, verdict } => {
            let (sign, word, verdict) = match verdict {
                Verdict::Fits => ("≤", "takes it", "fits"),
                Verdict::Idle => (">", "is idle and takes it", "idle"),
                Verdict::Over => (">", "is over its cap", "over"),
            };
            pb::Step {
                endpoint: Some(name(*endpoint).to_owned()),
                load: Some(*load),
                cost: Some(*cost),
                cap: Some(tenth(*cap)),
                verdict: Some(verdict.to_owned()),
                ..named(
                    "test",
                    format!(
                        "{}: {load} + {cost} = {} {sign} {}{} → {word}",
                        name(*endpoint),
                        load.saturating_add(*cost),
                        tenth(*cap),
                        if (weight - 1.0).abs() < 1e-9 {
                            String::new()
                        } else {
                            format!(
                                " (its weight is {} of the average)",
                                (weight * 100.0).round() / 100.0
                            )
                        }
                    ),
                )
            }
        }
        Step::AllOver { endpoint, load } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            load: Some(*load),
            ..named(
                "all-over",
                format!("all are over their cap → least loaded: {} with {load}", name(*endpoint)),
            )
        },
        Step::Least { endpoint, load, unit } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            load: Some(*load),
            unit: Some(unit.as_str().to_owned()),
            ..named(
                "least-loaded",
                format!(
                    "least loaded for its weight: {} with {load} {}",
                    name(*endpoint),
                    unit.as_str()
                ),
            )
        },
        Step::Costs { endpoint, cached, terms } => {
            let parts = terms.named();
            let parts = parts.iter().filter(|(_, seconds)| *seconds != 0.0);
            let text: Vec<String> =
                parts.clone().map(|(part, seconds)| format!("{part} {}", time(*seconds))).collect();
            pb::Step {
                endpoint: Some(name(*endpoint).to_owned()),
                cached: Some(*cached),
                seconds: Some(terms.total()),
                terms: parts
                    .map(|(name, seconds)| pb::Term { name: (*name).to_owned(), seconds: *seconds })
                    .collect(),
                ..named(
                    "cost-in-seconds",
                    format!(
                        "{} costs {} with {cached} tokens cached: {}",
                        name(*endpoint),
                        time(terms.total()),
                        text.join(" + ")
                    ),
                )
            }
        }
        Step::Told { endpoint, cached } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            cached: Some(*cached),
            ..named(
                "told",
                format!("{} says that it has {cached} tokens of it cached", name(*endpoint)),
            )
        },
        Step::Scores { endpoint, cached, parts } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            cached: Some(*cached),
            score: Some(Score::total(parts)),
            scores: parts
                .iter()
                .map(|part| pb::Score {
                    name: part.name.to_owned(),
                    weight: part.weight,
                    score: part.score,
                })
                .collect(),
            ..named("score", scores(name(*endpoint), *cached, parts))
        },
        Step::Affinity { sticky, of, threshold, behind, gate } => pb::Step {
            kept: Some(u64::from(count(if *gate == Gate::Closed { *sticky } else { *of }))),
            seconds: *behind,
            verdict: Some(
                match gate {
                    Gate::NobodyHasIt => "nobody",
                    Gate::Closed => "kept",
                    Gate::Open => "behind",
                    Gate::Explores => "explores",
                }
                .to_owned(),
            ),
            ..named("affinity", affinity(*sticky, *of, *threshold, *behind, *gate))
        },
        Step::Longest { endpoint, cached, needed } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            cached: Some(*cached),
            threshold: Some(*needed),
            ..named(
                "longest",
                format!(
                    "most of it is cached on {}: {cached} tokens, {} {needed} → {}",
                    name(*endpoint),
                    if cached >= needed { "at least" } else { "fewer than" },
                    if cached >= needed { "there" } else { "too few" },
                ),
            )
        },
        Step::Holders { cached, endpoints } => pb::Step {
            cached: Some(*cached),
            kept: Some(u64::from(count(*endpoints))),
            ..named(
                "holders",
                format!("the longest prefix of it, {cached} tokens, is on {endpoints} endpoints"),
            )
        },
        Step::Ring { endpoint } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            ..named("ring", format!("first on the ring: {}", name(*endpoint)))
        },
        Step::Ranked { endpoints } => {
            let names: Vec<&str> = endpoints.iter().map(|&slot| name(slot)).collect();
            named("ranked", format!("best by rendezvous hash: {}", names.join(", ")))
        }
        Step::Modulo { of, n, endpoint } => pb::Step {
            endpoint: Some(name(*endpoint).to_owned()),
            ..named("modulo", format!("{of} mod {n} = {}: {}", of % n, name(*endpoint)))
        },
    }
}

fn scores(name: &str, cached: u64, parts: &[Score]) -> String {
    let thousandth = |x: f64| (x * 1000.0).round() / 1000.0;
    let parts_text: Vec<String> = parts
        .iter()
        .map(|part| {
            format!("{} {} × {}", part.name, thousandth(part.weight), thousandth(part.score))
        })
        .collect();
    format!(
        "{name} scores {} with {cached} tokens cached: {}",
        thousandth(Score::total(parts)),
        parts_text.join(" + ")
    )
}

fn affinity(sticky: usize, of: usize, threshold: f64, behind: Option<f64>, gate: Gate) -> String {
    let have = format!("{sticky} of {of} endpoints have {threshold} of it or more");
    let behind = behind.map_or_else(String::new, |seconds| {
        let word = if seconds < 0.0 { "ahead of" } else { "behind" };
        format!(", the least busy of them {} {word} the others", time(seconds.abs()))
    });
    let gate = match gate {
        Gate::NobodyHasIt => "all are kept",
        Gate::Closed => "only they are kept",
        Gate::Open => "too far, all are kept",
        Gate::Explores => "to explore, all are kept",
    };
    format!("{have}{behind} → {gate}")
}

/// Rounds to a tenth: more digits hide the number.
fn tenth(x: f64) -> f64 {
    (x * 10.0).round() / 10.0
}

/// Writes a hash so that no JSON tool rounds it.
fn hex(hash: u64) -> String {
    format!("{hash:016x}")
}

fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
