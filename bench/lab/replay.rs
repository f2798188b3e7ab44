//! `replay`: the records of a running picker, decided again under another policy or configuration; what would have
//! gone elsewhere, and what that is estimated to change.

mod engines;
mod recording;
mod sequence;
mod tally;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::PathBuf;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use llm_ring::config::{self, Config, Points};
use llm_ring::pool::{MOST_TOKENS, Sight};
use llm_ring::scheduling::POLICIES;
use llm_ring::telemetry::{explain, recall};
use llm_ring::yaml;
use serde::Serialize;
use serde_yaml::Value;

use engines::View;
use recording::{Recorded, Recording, Skipped};
use tally::{Now, Pair, Row, Side, Summary, Tally};

#[derive(Debug, Args)]
pub(crate) struct Replay {
    /// Files of records, of one picker or of several, in any order (`records.path`, and the older ones beside it)
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// Decide under this policy, such as `llm-aware{epsilon: 0.5}`; default: the one that was recorded, or that of
    /// --config. Without either, what differs is the replay's own error
    #[arg(long, short, value_name = "NAME")]
    policy: Option<String>,
    /// Decide under this configuration of a picker; default: the one that was recorded
    #[arg(long, short, value_name = "FILE")]
    config: Option<PathBuf>,
    /// What load and memory are those decisions made on
    #[arg(long, value_name = "MODE", value_enum, default_value_t = Mode::Sequence)]
    mode: Mode,
    /// How to print
    #[arg(long, value_name = "FORMAT", value_enum, default_value_t = Format::Text)]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    /// Those that the decisions before them have made: all arrivals once more, in their order
    Sequence,
    /// Those that were recorded: each decision on its own
    Alone,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people
    Text,
    /// All of it for programs
    Json,
    /// A row for each request
    Csv,
}

/// What is printed.
#[derive(Debug, Serialize)]
struct Report {
    mode: Mode,
    policy: String,
    recorded: Source,
    #[serde(flatten)]
    summary: Summary,
    /// How the numbers were estimated, and what is not known.
    notes: Vec<String>,
    #[serde(skip)]
    rows: Vec<Row>,
}

/// What was read.
#[derive(Debug, Serialize)]
struct Source {
    files: usize,
    lines: u64,
    pickers: usize,
    seconds: f64,
    policies: BTreeMap<String, u64>,
    refused: BTreeMap<String, u64>,
    skipped: BTreeMap<String, Skipped>,
    lost: u64,
    missing: u64,
    before: u64,
}

impl Replay {
    pub(crate) fn run(&self) -> Result<()> {
        let report = self.make()?;
        let text = match self.format {
            Format::Text => report.text(),
            Format::Json => serde_json::to_string_pretty(&report)? + "\n",
            Format::Csv => report.csv(),
        };
        crate::print(&text)
    }

    fn make(&self) -> Result<Report> {
        let whole = self.mode == Mode::Alone;
        let mut recording = Recording::read(&self.files, whole)?;
        let configs = self.configs(&recording)?;
        let span = span(&recording);
        let mut policies = BTreeMap::new();
        for decision in &recording.decisions {
            *policies.entry(decision.record.policy.clone()).or_insert(0) += 1;
        }
        let tally = match self.mode {
            Mode::Sequence => {
                let points = self.config.is_some();
                sequence::replay(&mut recording, &self.files, &configs, points)?
            }
            Mode::Alone => self.alone(&mut recording, &configs)?,
        };
        if tally.rows.is_empty() {
            bail!("there is no decision to make again{}", skipped_text(&recording.skipped));
        }
        let named: BTreeSet<&str> = configs.iter().map(|config| config.policy.as_str()).collect();
        let named = named.into_iter().collect::<Vec<_>>().join(", ");
        let policy = match (&self.policy, &self.config) {
            (Some(policy), _) => policy.clone(),
            (None, Some(file)) => format!("{named} of {}", file.display()),
            (None, None) => "as recorded".to_owned(),
        };
        let summary = tally.summary(span);
        let runs = &recording.runs;
        Ok(Report {
            mode: self.mode,
            policy,
            notes: notes(self.mode, &summary, &recording),
            summary,
            recorded: Source {
                files: self.files.len(),
                lines: recording.lines,
                pickers: runs.len(),
                seconds: span,
                policies,
                lost: recording.lost,
                missing: runs.iter().map(|run| run.missing).sum(),
                before: runs.iter().map(|run| run.before).sum(),
                refused: recording.refused,
                skipped: recording.skipped,
            },
            rows: tally.rows,
        })
    }

    /// Returns the configuration of each run.
    fn configs(&self, recording: &Recording) -> Result<Vec<Config>> {
        if let Some(path) = &self.config {
            let file = Some(config::File::read(path)?);
            let config = config::load(file, &Vec::new(), &Vec::new())?.config;
            let config = self.under(config)?;
            return Ok(vec![config; recording.runs.len()]);
        }
        let configs = recording.runs.iter().map(|run| {
            let recorded: Config = serde_json::from_value(run.config.clone()).with_context(|| {
                format!(
                    "the configuration of run {} is not one of this version: give one with --config",
                    run.id
                )
            })?;
            self.under(recorded)
        });
        configs.collect()
    }

    /// Sets the policy and its parameters.
    fn under(&self, config: Config) -> Result<Config> {
        match &self.policy {
            None => Ok(config),
            Some(policy) => with_policy(config, policy).with_context(|| format!("`{policy}`")),
        }
    }

    /// Decides each record on its own.
    fn alone(&self, recording: &mut Recording, configs: &[Config]) -> Result<Tally> {
        let mut tally = Tally::default();
        // Lines of a decision log say nothing of the configuration.
        let other = match configs.first() {
            Some(config) => config.clone(),
            None if self.config.is_some() => {
                let file = self.config.as_deref().map(config::File::read).transpose()?;
                self.under(config::load(file, &Vec::new(), &Vec::new())?.config)?
            }
            None => self.under(Config::default())?,
        };
        for recorded in std::mem::take(&mut recording.decisions) {
            let config = recorded.run.map_or(&other, |run| &configs[run]);
            let as_recorded = self.policy.is_none() && self.config.is_none();
            let name = match recorded.run {
                None if as_recorded => recorded.record.policy.as_str(),
                Some(_) | None => config.policy.as_str(),
            };
            let points =
                if self.config.is_some() { None } else { Some(recorded.record.ring_points) };
            match decide(&recorded, config, name, points) {
                Ok((row, steps)) => tally.add(row, steps),
                Err(error) => {
                    let why = if recorded.record.loads.is_empty() {
                        "without the loads that a decision alone needs"
                    } else {
                        "with a value that cannot be read"
                    };
                    recording.skip(why, &self.files, recorded.place, &format!("{error:#}"));
                }
            }
        }
        Ok(tally)
    }
}

/// Sets a policy such as `llm-aware` or `llm-aware{epsilon: 0.5}`; parameters that are not named stay.
fn with_policy(config: Config, spec: &str) -> Result<Config> {
    let (name, parameters) = spec.find('{').map_or((spec, "{}"), |at| spec.split_at(at));
    if !POLICIES.iter().any(|(known, _)| *known == name) {
        let known: Vec<&str> = POLICIES.iter().map(|&(name, _)| name).collect();
        bail!(yaml::unknown("policy", name, &known));
    }
    let parameters: serde_yaml::Mapping = serde_yaml::from_str(parameters)?;
    let mut document = serde_yaml::to_value(config)?;
    document["policy"] = Value::from(name);
    for (key, value) in parameters {
        document["policies"][name][key] = value;
    }
    Ok(serde_yaml::from_value(document)?)
}

/// Decides one record on its own.
fn decide(
    recorded: &Recorded,
    config: &Config,
    policy: &str,
    points: Option<u32>,
) -> Result<(Row, Vec<String>)> {
    let record = &recorded.record;
    let points = match points {
        None | Some(0) => config.ring.points,
        Some(points) => Points::try_from(u64::from(points)).map_err(anyhow::Error::msg)?,
    };
    let mut scenario = recall::scenario(record, points.get())?;
    scenario.prices = (&config.prices).into();
    scenario.prompt_tokens = scenario.prompt_tokens.min(MOST_TOKENS);
    scenario.max_tokens = scenario.max_tokens.min(MOST_TOKENS);
    if recorded.run.is_some() {
        let limit = recorded.asked.max_tokens.unwrap_or(config.load.default_max_tokens);
        scenario.max_tokens = limit.min(MOST_TOKENS);
    }
    let (name, policy) =
        config.policies.get(policy).with_context(|| format!("there is no policy `{policy}`"))?;
    let decision = scenario.decide(name, &*policy)?;
    let target = &decision.pool.endpoint(decision.target()).name;

    let outcome = record.outcome.as_ref().map(recall::outcome).transpose()?;
    let usage = outcome.as_ref().map(|outcome| outcome.usage.clone()).unwrap_or_default();
    let prompt = usage.prompt_tokens.unwrap_or(record.prompt_tokens).min(MOST_TOKENS);
    let output = usage.completion_tokens.unwrap_or(0).min(MOST_TOKENS);
    let sight = |name: &str| scenario.sights.iter().find(|(of, _)| of == name).map(|(_, it)| *it);
    let view = |name: &str| sight(name).map(|sight| View::seen(&sight, prompt));
    let believed = |sight: Sight| {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it was made of a token count"
        )]
        let tokens = sight.cached as u64;
        tokens.min(prompt)
    };
    let cached = usage.cached_tokens.map(|cached| cached.min(prompt));
    let then_cached = cached.or_else(|| sight(&record.target).map(believed));
    let ttft = recorded.first.map(|first| seconds_between(recorded.at, first));
    let took = seconds_between(recorded.at, recorded.end);
    let then = Side {
        endpoint: record.target.clone(),
        reason: record.reason.clone(),
        cached_tokens: then_cached,
        ttft,
        view: view(&record.target),
        seconds: took,
    };
    let mut now = Side {
        endpoint: target.clone(),
        reason: decision.reason.as_str().to_owned(),
        ..then.clone()
    };
    let mut steps = Vec::new();
    if *target != record.target {
        steps = explain::record(&decision).steps.into_iter().map(|step| step.text).collect();
        now.cached_tokens = sight(target).map(believed);
        now.view = view(target);
        now.ttft = ttft.zip(then.view).zip(now.view).map(|((ttft, was), is)| {
            let change = is.first_token() - was.first_token();
            // However much the estimate takes away, its own prompt has to be computed.
            (ttft + change).max(ttft.min(is.idle))
        });
        let change = now.ttft.zip(ttft).map_or(0.0, |(now, then)| now - then);
        now.seconds = (took + change).max(0.0);
    }
    let succeeded = outcome.as_ref().is_some_and(llm_ring::pool::Outcome::succeeded);
    let row = Row::of(recorded, prompt, output, succeeded, then).measured(cached.is_some());
    Ok((row.now(Now::Goes(now)), steps))
}

#[expect(clippy::cast_precision_loss, reason = "far less than 2^52 nanoseconds")]
fn seconds_between(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e9
}

/// Seconds from the first pick to the last end.
fn span(recording: &Recording) -> f64 {
    let first = recording.decisions.iter().map(|it| it.at).min().unwrap_or(0);
    let last = recording.decisions.iter().map(|it| it.end).max().unwrap_or(0);
    seconds_between(first, last)
}

/// Says how the numbers were estimated, and what is not known.
fn notes(mode: Mode, summary: &Summary, recording: &Recording) -> Vec<String> {
    let mut notes = Vec::new();
    match mode {
        Mode::Sequence => {
            notes.push(
                "Cached tokens: as the engine told, where a request goes to the same endpoint and its conversation was \
                 served there last as it was then; elsewhere the share that conversations found again of what they had \
                 left there, and for a conversation that is new to an endpoint what such ones had (a median for each model)."
                    .to_owned(),
            );
            notes.push(
                "Time to the first token: the recorded time, and the difference that the prices make between two \
                 pictures of the engines, one of the recorded decisions and one of these: prompts before it, tokens to \
                 compute, answers beside it. Paces are fitted to the recording, an endpoint at a time."
                    .to_owned(),
            );
            notes.push(
                "Not known: what engines evict, what prompts of different conversations share, and when clients would \
                 have sent their next turn. A request that failed or was given up does so at the same time."
                    .to_owned(),
            );
        }
        Mode::Alone => {
            notes.push(
                "Each decision stands alone, on the load and the memory that were recorded: what many different \
                 decisions would do to both is not in it (--mode sequence)."
                    .to_owned(),
            );
            notes.push(
                "Cached tokens and times to the first token elsewhere are what the picker believed of that endpoint \
                 then, by its own dispatches, at the prices; where a request stays they are as recorded."
                    .to_owned(),
            );
        }
    }
    let error = &summary.error;
    if let (Mode::Sequence, Some(rate)) = (mode, error.hit_rate) {
        notes.push(format!(
            "The estimate of cached tokens, made of the recorded decisions too, gives a hit rate of {} where engines told {}.",
            percent(rate.now),
            percent(rate.then)
        ));
    }
    if let (Mode::Sequence, Some(median), Some(ratio)) =
        (mode, error.ttft_median_error, error.ttft_ratio)
    {
        notes.push(format!(
            "The prices alone, at the fitted pace of {:.3} and waiting for {:.0} % of the prompts before, give {ratio:.2} times the \
             recorded times to the first token in sum, and miss one by {} in the median: a difference that is smaller than \
             that says nothing.",
            error.prompt_pace.unwrap_or(1.0),
            error.waits.unwrap_or(1.0) * 100.0,
            time(median)
        ));
    }
    if summary.measured < summary.served {
        notes.push(format!(
            "Of {} requests that were served, {} have no cached tokens that an engine told: theirs are estimates, then and now.",
            summary.served,
            summary.served - summary.measured
        ));
    }
    if error.early_turns > 0 {
        notes.push(format!(
            "{} turns come before the answer that they follow has ended now: their clients would have sent them later.",
            error.early_turns
        ));
    }
    let sum = |of: fn(&recording::Run) -> u64| recording.runs.iter().map(of).sum::<u64>();
    let (before, missing) = (sum(|run| run.before), sum(|run| run.missing));
    if before > 0 {
        notes.push(format!(
            "{before} decisions before the first one are not in the files: the load at the beginning is not known, and of \
             the memory only what these records say."
        ));
    }
    if missing > 0 || recording.lost > 0 {
        notes.push(format!(
            "{missing} decisions between the others are not in the files ({} are said to be lost there): their load is missing.",
            recording.lost
        ));
    }
    notes
}

fn skipped_text(skipped: &BTreeMap<String, Skipped>) -> String {
    let mut text = String::new();
    for (why, Skipped { lines, first }) in skipped {
        let _ = write!(text, "\n  {lines} lines {why}; the first: {first}");
    }
    text
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// Writes seconds as people read them.
fn time(seconds: f64) -> String {
    if seconds.abs() < 1.0 {
        format!("{:.1} ms", seconds * 1000.0)
    } else {
        format!("{seconds:.2} s")
    }
}

impl Report {
    fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a text cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> std::fmt::Result {
        let Source { files, lines, pickers, seconds, policies, .. } = &self.recorded;
        let policies: Vec<String> =
            policies.iter().map(|(policy, count)| format!("{policy} {count}")).collect();
        let summary = &self.summary;
        writeln!(
            out,
            "Recorded: {}, {}, {}, {} over {}; decided by {}",
            counted(*files, "file"),
            counted(usize::try_from(*lines).unwrap_or(usize::MAX), "line"),
            counted(*pickers, "picker run"),
            counted(summary.decisions, "decision"),
            time(*seconds),
            policies.join(", ")
        )?;
        for (why, count) in &self.recorded.refused {
            writeln!(out, "  {count} were refused: {why}")?;
        }
        let skipped = skipped_text(&self.recorded.skipped);
        if !skipped.is_empty() {
            writeln!(out, "  Left out:{}", skipped.replace('\n', "\n  "))?;
        }
        let mode = match self.mode {
            Mode::Sequence => "in sequence",
            Mode::Alone => "each alone",
        };
        writeln!(out, "Replayed: {}, {mode}\n", self.policy)?;
        let share = |count: usize| percent(ratio(count, summary.decisions));
        writeln!(
            out,
            "Elsewhere: {} of {} ({})",
            summary.elsewhere,
            summary.decisions,
            share(summary.elsewhere)
        )?;
        if summary.refused > 0 {
            writeln!(out, "  {} of them would be refused", summary.refused)?;
        }
        for tally::Count { then, now, requests } in &summary.reasons {
            writeln!(out, "  {requests:>7}  {:>7}  {then} -> {now}", share(*requests))?;
        }
        if !summary.moves.is_empty() {
            writeln!(out, "\nFrom -> to")?;
        }
        for tally::Count { then, now, requests } in &summary.moves {
            let now = if now.is_empty() { "(refused)" } else { now };
            writeln!(out, "  {requests:>7}  {then} -> {now}")?;
        }
        let width = summary.endpoints.keys().map(String::len).max().unwrap_or(0).max(8);
        writeln!(
            out,
            "\n{:<width$}  {:>17}  {:>25}  {:>25}  {:>17}",
            "Endpoint",
            "requests",
            "prompt tokens computed",
            "tokens generated",
            "in flight (mean)"
        )?;
        for (name, loads) in &summary.endpoints {
            let pair = |pair: &Pair<u64>| format!("{} -> {}", pair.then, pair.now);
            writeln!(
                out,
                "{name:<width$}  {:>17}  {:>25}  {:>25}  {:>17}",
                pair(&loads.requests),
                pair(&loads.computed_tokens),
                pair(&loads.generated_tokens),
                format!("{:.2} -> {:.2}", loads.in_flight.then, loads.in_flight.now)
            )?;
        }
        self.write_estimates(out)?;
        self.write_greatest(out)?;
        writeln!(out, "\nHow it was estimated, and what is not known")?;
        for note in &self.notes {
            writeln!(out, "- {note}")?;
        }
        Ok(())
    }

    fn write_estimates(&self, out: &mut String) -> std::fmt::Result {
        let summary = &self.summary;
        writeln!(out, "\n{:<30}  {:>10}  {:>10}  {:>10}", "Estimated", "then", "now", "change")?;
        if let Some(Pair { then, now }) = summary.hit_rate {
            let (change, name) = ((now - then) * 100.0, "hit rate (cached tokens)");
            let change = format!("{change:+.1} pp");
            writeln!(out, "{name:<30}  {:>10}  {:>10}  {change:>10}", percent(then), percent(now))?;
        } else {
            writeln!(out, "{:<30}  not known: nothing says what was cached", "hit rate")?;
        }
        let ttft = &summary.ttft_seconds;
        for (name, pair) in [("mean", ttft.mean), ("p50", ttft.p50), ("p95", ttft.p95)] {
            let name = format!("time to first token, {name}");
            match pair {
                Some(Pair { then, now }) => {
                    let change = if then > 0.0 {
                        format!("{:+.1} %", (now / then - 1.0) * 100.0)
                    } else {
                        String::new()
                    };
                    writeln!(
                        out,
                        "{name:<30}  {:>10}  {:>10}  {change:>10}",
                        time(then),
                        time(now)
                    )?;
                }
                None => writeln!(out, "{name:<30}  not known: no first token was seen")?,
            }
        }
        Ok(())
    }

    fn write_greatest(&self, out: &mut String) -> std::fmt::Result {
        let greatest = &self.summary.greatest;
        if greatest.is_empty() {
            return Ok(());
        }
        writeln!(out, "\nThe {} greatest differences", greatest.len())?;
        for tally::Greatest { row, steps } in greatest {
            let conversation = if row.conversation.is_empty() { "-" } else { &row.conversation };
            let request = if row.request_id.is_empty() { "-" } else { &row.request_id };
            writeln!(
                out,
                "  {}  conversation {conversation}, request {request}, prompt {} tokens",
                row.time, row.prompt_tokens
            )?;
            for (word, side) in [("then", &row.then), ("now", &row.now)] {
                let endpoint = if side.endpoint.is_empty() { "nowhere" } else { &side.endpoint };
                let cached =
                    side.cached_tokens.map_or_else(|| "?".to_owned(), |tokens| tokens.to_string());
                let ttft = side.ttft.map_or_else(|| "?".to_owned(), time);
                let view = side.view.map_or_else(String::new, |view| {
                    format!(
                        "; {} before it ({}), {} beside it",
                        counted(view.waiting, "prompt"),
                        time(view.queue),
                        counted(view.answers as usize, "answer")
                    )
                });
                writeln!(
                    out,
                    "    {word:<4}  {endpoint} [{}]: {cached} tokens cached, first token after {ttft}{view}",
                    side.reason
                )?;
            }
            for step in steps {
                writeln!(out, "            {step}")?;
            }
        }
        Ok(())
    }

    fn csv(&self) -> String {
        let mut out = "time,request_id,conversation,model,sequence,prompt_tokens,completion_tokens,succeeded,measured,\
                       elsewhere,then_endpoint,now_endpoint,then_reason,now_reason,then_cached_tokens,now_cached_tokens,\
                       then_ttft_seconds,now_ttft_seconds,then_seconds,now_seconds\n"
            .to_owned();
        for row in &self.rows {
            let number =
                |value: Option<f64>| value.map_or_else(String::new, |it| format!("{it:.6}"));
            let tokens = |value: Option<u64>| value.map_or_else(String::new, |it| it.to_string());
            let (then, now) = (&row.then, &row.now);
            let fields = [
                quoted(&row.time),
                quoted(&row.request_id),
                quoted(&row.conversation),
                quoted(&row.model),
                row.sequence.to_string(),
                row.prompt_tokens.to_string(),
                row.completion_tokens.to_string(),
                row.succeeded.to_string(),
                row.measured.to_string(),
                row.elsewhere.to_string(),
                quoted(&then.endpoint),
                quoted(&now.endpoint),
                quoted(&then.reason),
                quoted(&now.reason),
                tokens(then.cached_tokens),
                tokens(now.cached_tokens),
                number(then.ttft),
                number(now.ttft),
                number(Some(then.seconds)),
                number(Some(now.seconds)),
            ];
            out.push_str(&fields.join(","));
            out.push('\n');
        }
        out
    }
}

fn ratio(part: usize, whole: usize) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "requests stay far below 2^52")]
    let ratio = part as f64 / whole.max(1) as f64;
    ratio
}

fn counted(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

/// Quotes a field where it needs it.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", field.replace('"', "\"\""))
    } else {
        field.to_owned()
    }
}
