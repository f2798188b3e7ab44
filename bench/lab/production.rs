//! The policies of this repository in the lab: the real scheduler, pool keeper and bookings, behind the lab's router.
//!
//! This file owns the start of the scheduler's clock, from which simulated time is counted; nothing depends on when.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use llm_ring::app;
use llm_ring::config::Config;
use llm_ring::index::hash;
use llm_ring::pool::{
    Conversation, Ending, Endpoint, InferenceRequest, KeySource, Outcome, PoolKeeper, PoolSnapshot,
    PromptSize, Usage, Warmup,
};
use llm_ring::scheduling::{Booking, Decided, Detail, Evidence, Hold, Moment, POLICIES, Scheduler};

use super::engine::Params;
use super::random::Random;
use super::rivals::UnderWay;
use super::sim::{Router, Setup, World};
use super::workload::Request;

/// What a picker sees beside its own dispatches.
#[derive(Debug, Clone, Copy, Default)]
#[expect(clippy::struct_excessive_bools, reason = "each is a word of a policy's name")]
struct Sees {
    /// Cache events: what of a prompt is cached where, and which prompts begin alike.
    events: bool,
    /// Polled metrics: KV use, and requests that wait.
    metrics: bool,
    /// Requests wait for an endpoint to have less to do.
    hold: bool,
    /// It is configured with the engines' prices.
    prices: bool,
}

/// What `+hold` switches on.
const HOLD: &str = "{backlog_ms: 300, longest_ms: 10000, requests: 1000000}";

/// The picker's own scheduler.
pub(crate) struct Production {
    scheduler: Arc<Scheduler>,
    keeper: PoolKeeper,
    start: Instant,
    /// How often each endpoint has been there: a new life has a new instance.
    lives: Vec<u32>,
    sees: Sees,
    /// What events have not said yet: blocks of prompts that are on their way.
    under_way: UnderWay,
    random: Random,
    bookings: HashMap<usize, Booking>,
    hold: Option<Hold<usize>>,
}

/// A policy of this repository, as a name says it.
#[derive(Debug)]
pub(crate) struct Named<'a> {
    name: &'a str,
    pub(crate) policy: &'a str,
    /// As YAML, in braces.
    pub(crate) parameters: &'a str,
    sees: Sees,
}

impl<'a> Named<'a> {
    /// Reads a name; `None` if there is no such policy.
    ///
    /// `llm-aware{epsilon: 0.5}` sets parameters; `marginal-cost+events+metrics` lets it see more than its own
    /// dispatches.
    ///
    /// # Errors
    /// It sees what there is not.
    pub(crate) fn read(name: &'a str) -> anyhow::Result<Option<Self>> {
        let mut words = name.split('+');
        let policy = words.next().unwrap_or_default();
        let (policy, parameters) =
            policy.find('{').map_or((policy, "{}"), |at| policy.split_at(at));
        let (policy, parameters) = match policy {
            // Envoy's name for it, which is the one of the comparison.
            "least-request" => ("least-loaded", "{load: requests}"),
            _ => (policy, parameters),
        };
        if !POLICIES.iter().any(|(known, _)| *known == policy) {
            return Ok(None);
        }
        let mut sees = Sees::default();
        for word in words {
            match word {
                "events" => sees.events = true,
                "metrics" => sees.metrics = true,
                "hold" => sees.hold = true,
                "prices" => sees.prices = true,
                _ => anyhow::bail!(
                    "`{name}`: a policy has `+events`, `+metrics`, `+hold` and `+prices`, and no `{word}`"
                ),
            }
        }
        Ok(Some(Self { name, policy, parameters, sees }))
    }

    /// Tells whether it has more than its name and its parameters.
    pub(crate) fn has_words(&self) -> bool {
        let Sees { events, metrics, hold, prices } = self.sees;
        events || metrics || hold || prices
    }

    /// Makes its configuration.
    ///
    /// # Errors
    /// A parameter is wrong.
    pub(crate) fn config(&self, engine: &Params) -> anyhow::Result<Config> {
        let Self { name, policy, parameters, .. } = self;
        let yaml = format!("{{policy: {policy}, policies: {{{policy}: {parameters}}}}}");
        let mut config: Config =
            serde_yaml::from_str(&yaml).with_context(|| format!("`{name}`"))?;
        if self.sees.hold {
            config.hold = serde_yaml::from_str(HOLD)?;
        }
        if self.sees.prices {
            let Params { overhead, floor, prefill, decode, attention, context, .. } = engine;
            let Params { budget, sequences, tokens, .. } = engine;
            config.prices = serde_yaml::from_str(&format!(
                "{{overhead: {overhead}, floor: {floor}, prefill: {prefill}, decode: {decode}, quadratic: {attention}, \
                 context: {context}, budget: {budget}, sequences: {sequences}, capacity: {tokens}}}"
            ))?;
        }
        Ok(config)
    }
}

/// Builds a policy of this repository; `None` if it has none of that name.
///
/// # Errors
/// A parameter is wrong.
pub(crate) fn build(name: &str, setup: &Setup) -> anyhow::Result<Option<Box<dyn Router>>> {
    let Some(named) = Named::read(name)? else { return Ok(None) };
    Ok(Some(Box::new(Production::new(&named.config(&setup.params)?, named.sees, setup)?)))
}

impl Production {
    fn new(config: &Config, sees: Sees, setup: &Setup) -> anyhow::Result<Self> {
        let warmup = Warmup {
            time: Duration::from_secs(config.warmup.seconds.into()),
            steps: config.warmup.steps.get(),
        };
        let mut keeper = PoolKeeper::new(config.ring.points.get(), warmup);
        #[expect(clippy::disallowed_methods, reason = "the keeper counts from an instant")]
        let start = Instant::now();
        let lives = vec![1; setup.endpoints];
        let members = (0..setup.endpoints).map(|number| endpoint(number, 1)).collect();
        keeper.update(members, start).context("endpoints of the lab make a pool")?;
        let scheduler = Arc::new(Scheduler::new(app::settings(config)?, keeper.pool()));
        Ok(Self {
            scheduler,
            keeper,
            start,
            lives,
            sees,
            under_way: UnderWay::default(),
            random: Random::new(setup.seed),
            bookings: HashMap::new(),
            hold: app::hold(config).map(Hold::new),
        })
    }

    /// Tells the keeper who is there.
    fn update(&mut self, world: &World) {
        let members =
            world.live().iter().map(|&number| endpoint(number, self.lives[number])).collect();
        let now = self.start + since_start(world.now());
        let change = self.keeper.update(members, now).expect("names and addresses differ");
        if let Some(change) = change {
            self.scheduler.adopt(change.pool);
        }
    }

    /// Notes where a request goes.
    fn book(&mut self, request: &Request, decided: Decided, world: &World) -> usize {
        let (decision, booking) = decided.expect("a pool without limits refuses nothing");
        self.bookings.insert(request.index, booking);
        let endpoint = number(&decision.pool.endpoint(decision.target()).name);
        if self.sees.events {
            self.under_way.put(request, endpoint, world.block_space());
        }
        endpoint
    }

    /// Returns what engines say of themselves, by slot.
    fn evidence(&self, request: &Request, pool: &PoolSnapshot, world: &World) -> Seen {
        let numbers = || pool.endpoints().iter().map(|endpoint| number(&endpoint.name));
        let mut seen = Seen::default();
        if self.sees.events {
            let alike = request.blocks[request.blocks.len() / 2];
            seen.prefix = Some(hash::hash(&alike.to_le_bytes()));
            let cached = |number| Some(tokens(world.prefix_tokens(number, request)));
            let coming = |number| {
                let blocks = self.under_way.prefix(number, request, world) as i64;
                Some(tokens((blocks * world.params.block).min(request.prompt)))
            };
            seen.cached = numbers().map(cached).collect();
            seen.coming = numbers().map(coming).collect();
        }
        if self.sees.metrics {
            let metrics = world.metrics();
            seen.memory = numbers().map(|number| Some(metrics[number].cache)).collect();
            seen.waiting = numbers().map(|number| Some(metrics[number].waiting as u64)).collect();
            seen.running = numbers().map(|number| Some(metrics[number].running as u64)).collect();
        }
        seen
    }
}

#[derive(Default)]
struct Seen {
    cached: Vec<Option<u64>>,
    coming: Vec<Option<u64>>,
    memory: Vec<Option<f64>>,
    waiting: Vec<Option<u64>>,
    running: Vec<Option<u64>>,
    prefix: Option<u64>,
}

impl Seen {
    fn moment(&self, now: Duration, seed: u64) -> Moment<'_> {
        let Self { cached, coming, memory, waiting, running, prefix } = self;
        let evidence = Evidence {
            cached,
            coming,
            memory,
            waiting,
            running,
            adapters: &[],
            ..Evidence::default()
        };
        Moment { now, seed, evidence, prefix: *prefix, held: Duration::ZERO }
    }
}

fn since_start(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds)
}

/// Makes the endpoint of a number, in its so manieth life.
fn endpoint(number: usize, life: u32) -> Endpoint {
    let [high, low] = u16::try_from(number).expect("a number of an endpoint").to_be_bytes();
    let address = std::net::SocketAddr::from(([10, 0, high, low], 8000));
    Endpoint { instance: life.to_string(), ..Endpoint::new(format!("llm-{number}"), address) }
}

fn tokens(tokens: i64) -> u64 {
    u64::try_from(tokens).unwrap_or(0)
}

fn number(name: &str) -> usize {
    let number = name.strip_prefix("llm-").and_then(|number| number.parse().ok());
    number.expect("the endpoints of the lab are named so")
}

/// Says what the picker reads of a request.
fn inference_request(request: &Request) -> InferenceRequest {
    let source = KeySource::Header("x-conversation-id".to_owned());
    InferenceRequest {
        conversation: Some(Conversation::named(request.key.to_string(), source)),
        prompt: PromptSize { token_ids: tokens(request.prompt), ..PromptSize::default() },
        max_tokens: Some(tokens(request.output)),
        ..InferenceRequest::default()
    }
}

impl Router for Production {
    fn choose(&mut self, request: &Request, now: f64, world: &World) -> Option<usize> {
        let time = since_start(now);
        if let Some(change) = self.keeper.tick(self.start + time) {
            self.scheduler.adopt(change.pool);
        }
        let seen = self.evidence(request, &self.keeper.pool(), world);
        let moment = seen.moment(time, self.random.bits());
        let asked = inference_request(request);
        let decided = match &mut self.hold {
            None => self.scheduler.schedule(&asked, moment, Detail::Normal),
            Some(hold) => {
                let owner = || request.index;
                hold.offer(&self.scheduler, &asked, owner, moment, Detail::Normal)?
            }
        };
        Some(self.book(request, decided, world))
    }

    fn release(&mut self, now: f64, world: &World) -> Option<(usize, usize)> {
        let (time, pool) = (since_start(now), self.keeper.pool());
        // What is known of each, since the hold asks for it by the request alone.
        let mut hold = self.hold.take()?;
        let seen: HashMap<usize, Seen> = hold
            .owners()
            .map(|&index| {
                let request = world.request(index);
                (index, self.evidence(request, &pool, world))
            })
            .collect();
        let released = hold.release(
            &self.scheduler,
            time,
            |&index| seen[&index].moment(time, self.random.bits()),
            Detail::Normal,
        );
        self.hold = Some(hold);
        let (index, decided) = released?;
        Some((index, self.book(world.request(index), decided, world)))
    }

    fn holds(&self) -> bool {
        self.hold.as_ref().is_some_and(|hold| !hold.is_empty())
    }

    fn on_peer_dispatch(&mut self, _: &Request, _: usize, _: f64, _: &World) {}

    fn on_first(&mut self, request: &Request, now: f64, _: &World) {
        self.under_way.take(request);
        if let Some(booking) = self.bookings.get_mut(&request.index) {
            booking.first_token(since_start(now));
        }
    }

    fn on_finish(&mut self, request: &Request, now: f64, world: &World) {
        self.under_way.take(request);
        let Some(booking) = self.bookings.remove(&request.index) else { return };
        let tokens = |tokens: i64| u64::try_from(tokens).ok();
        let outcome = if world.succeeded(request) {
            Outcome {
                ending: Ending::Complete,
                status: Some(200),
                served: None,
                usage: Usage {
                    prompt_tokens: tokens(request.prompt),
                    completion_tokens: tokens(request.output),
                    cached_tokens: tokens(world.cached(request)),
                    response_id: None,
                },
            }
        } else {
            Outcome::default()
        };
        booking.finish(&outcome, since_start(now));
    }

    fn on_added(&mut self, endpoint: usize, world: &World) {
        *super::rivals::room_for(&mut self.lives, endpoint) += 1;
        self.update(world);
    }

    fn on_removed(&mut self, _: usize, world: &World) {
        self.update(world);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Run;
    use crate::sim::{Knobs, run};
    use crate::workload::Traces;
    use crate::workload::tests::inline;

    fn run_on(policy: &str, changes: &str) -> Run {
        let point = inline(&format!(
            "{{engine: cpu, endpoints: 3, slo: {{ttft: 60, itl: 1}}, changes: [{changes}], traffic: {{kind: chat, \
             users: 12, conversations_per_user: 2, ramp: 20, opening: 200, turns: 4, input: 60, output: 40}}}}"
        ));
        let one = (policy, 1);
        run(&point, one, &Traces::default(), Knobs::default(), |setup| {
            match build(policy, setup)? {
                Some(router) => Ok(router),
                None => crate::rivals::build(policy, setup),
            }
        })
        .unwrap()
    }

    #[test]
    fn a_turn_is_a_turn() {
        // They begin with different endpoints; that aside, every request goes the same.
        let times = |policy: &str| -> Vec<(Option<f64>, Option<f64>)> {
            run_on(policy, "").rows.iter().map(|row| (row.ttft, row.e2e)).collect()
        };
        assert!(times("round-robin") == times("proto-round-robin"));
    }

    #[test]
    fn every_policy_works_on_a_pool_that_changes() {
        let changes =
            "{at: 20, join: 1}, {at: 30, crash: 1}, {at: 40, leave: 0}, {at: 60, return: 1}";
        for (policy, _) in POLICIES {
            for sees in ["", "+events+metrics"] {
                let run = run_on(&format!("{policy}{sees}"), changes);
                assert_eq!(run.rows.len(), 12 * 2 * 4, "{policy}");
                let late = run.rows.iter().filter(|row| row.sent > 60.0);
                assert!(
                    late.clone().count() > 0 && late.clone().all(|row| row.endpoint != Some(0))
                );
                assert!(run.rows.iter().all(|row| row.e2e.is_some() || row.endpoint == Some(1)));
            }
        }
    }

    #[test]
    fn parameters_and_sight_come_with_the_name() {
        let setup = |endpoints| Setup {
            params: Params::named("cpu").unwrap(),
            endpoints,
            seed: 1,
            unseen: 1,
        };
        assert!(build("gaie", &setup(3)).unwrap().is_none());
        assert!(build("llm-aware{epsilon: 0.5, token_load: false}", &setup(3)).unwrap().is_some());
        assert!(build("llm-aware{epsilom: 0.5}", &setup(3)).is_err());
        assert!(build("llm-aware+everything", &setup(3)).is_err());
    }
}
