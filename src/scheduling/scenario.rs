//! One decision on its own: endpoints with given loads, one request, and what placement memory says.
//!
//! It runs the same policies over the same ledger as production, so a recorded decision can be made again, under the
//! same policy or another, and a textbook example can be worked through.

use std::num::NonZeroUsize;
use std::sync::Arc;

use super::{Candidates, Cx, Decision, Detail, Policy, Sights, Trace, scheduler};
use crate::pool::{
    Conversation, Endpoint, Load, LoadLedger, Placed, PoolError, PoolSnapshot, Prices, Sight,
};

/// What a decision depends on.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The endpoints that could be chosen, with their loads.
    pub endpoints: Vec<(Endpoint, Load)>,
    /// Virtual nodes for each unit of weight.
    pub ring_points: u32,
    /// The conversation, if the request belongs to one.
    pub conversation: Option<Conversation>,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens that may be generated.
    pub max_tokens: u64,
    /// Name of the endpoint that last served the conversation, and the tokens cached there.
    pub placed: Option<(String, u64)>,
    /// Decisions before this one.
    pub sequence: u64,
    /// The value drawn for it.
    pub seed: u64,
    /// Endpoints that the decision names.
    pub destinations: NonZeroUsize,
    /// What was seen of the engines, by the names of their endpoints.
    pub sights: Vec<(String, Sight)>,
    /// Tokens that the answer is expected to have.
    pub output: f64,
    /// Requests of lately that begin as this one does.
    pub hot: f64,
    /// How many times the price work takes in the pool.
    pub scale: f64,
    /// What work costs; a record does not say it.
    pub prices: Prices,
}

/// Why a scenario cannot be decided.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScenarioError {
    /// There is nothing to choose from.
    #[error("there are no endpoints to choose from")]
    NoEndpoints,
    /// The endpoints are not a pool.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

impl Scenario {
    /// Decides under `policy`.
    ///
    /// # Errors
    /// There are no endpoints, or two of them have one name or address.
    pub fn decide(
        &self,
        policy_name: &'static str,
        policy: &dyn Policy,
    ) -> Result<Decision, ScenarioError> {
        let endpoints: Vec<Endpoint> =
            self.endpoints.iter().map(|(endpoint, _)| endpoint.clone()).collect();
        let pool = Arc::new(PoolSnapshot::new(0, endpoints, self.ring_points)?);
        let slot_of = |name: &str| {
            (0u32..)
                .zip(pool.endpoints())
                .find(|(_, endpoint)| endpoint.name == name)
                .map(|(slot, _)| slot)
        };
        let candidates = Candidates::All(u32::try_from(self.endpoints.len()).unwrap_or(u32::MAX));
        if candidates.is_empty() {
            return Err(ScenarioError::NoEndpoints);
        }
        let mut ledger = LoadLedger::new(self.prices);
        ledger.adopt(&pool);
        for (endpoint, load) in &self.endpoints {
            ledger.preset(
                slot_of(&endpoint.name).expect("the pool is made of these endpoints"),
                *load,
            );
        }
        let placed = self.placed.as_ref().and_then(|(name, cached)| {
            let slot = slot_of(name)?;
            Some((
                slot,
                Placed {
                    endpoint: pool.ids()[slot as usize],
                    held: *cached,
                    kept: 1.0,
                    counted: None,
                },
            ))
        });
        let mut sights: Vec<Sight> = (0u32..)
            .zip(pool.endpoints())
            .map(|(slot, _)| ledger.sight(slot, std::time::Duration::ZERO))
            .collect();
        // Where nothing was seen, what is remembered is what is known.
        if let Some((slot, placed)) = placed {
            #[expect(clippy::cast_precision_loss, reason = "tokens stay far below 2^52")]
            let held = placed.cached().min(self.prompt_tokens) as f64;
            let sight = &mut sights[slot as usize];
            (sight.held, sight.cached) = (held, held);
        }
        for (name, sight) in &self.sights {
            if let Some(slot) = slot_of(name) {
                sights[slot as usize] = *sight;
            }
        }
        let mut trace = Trace {
            conversation: self.conversation.as_ref().map(|c| (c.id.clone(), c.source.clone())),
            prompt_tokens: self.prompt_tokens,
            max_tokens: self.max_tokens,
            ..Trace::default()
        };
        let cx = Cx {
            pool: &pool,
            candidates: &candidates,
            weight: candidates.weight(&pool),
            ledger: &ledger,
            key: self.conversation.as_ref().map_or(self.seed, |conversation| conversation.key),
            in_conversation: self.conversation.is_some(),
            model: None,
            prompt_tokens: self.prompt_tokens,
            max_tokens: self.max_tokens,
            placed,
            places: &[],
            sequence: self.sequence,
            seed: self.seed,
            sights: Sights::Recorded(&sights),
            output: self.output,
            hot: self.hot,
            scale: self.scale,
            detail: Detail::Full,
        };
        let choice = scheduler::choose(policy, &cx, &mut trace);
        let targets = scheduler::targets(&cx, choice.slot, self.destinations);
        Ok(Decision {
            policy: policy_name,
            reason: choice.reason,
            targets,
            cached: choice.cached,
            pool: Arc::clone(&pool),
            trace,
        })
    }

    /// The worked example: three replicas, one of them busy, and a long conversation cached there.
    ///
    /// # Panics
    /// Never: its addresses are literal.
    #[must_use]
    pub fn example() -> Self {
        let endpoint = |n: u8, tokens: u64, requests: u64| {
            let address = std::net::SocketAddr::from(([10, 0, 0, 10 + n], 8000));
            (Endpoint::new(format!("llm-{n}"), address), Load { requests, tokens })
        };
        Self {
            endpoints: vec![endpoint(0, 2400, 4), endpoint(1, 900, 2), endpoint(2, 900, 2)],
            ring_points: 100,
            conversation: Some(Conversation::named(
                EXAMPLE_CONVERSATION.to_owned(),
                crate::pool::KeySource::Header("x-conversation-id".to_owned()),
            )),
            prompt_tokens: 860,
            max_tokens: 48,
            placed: Some(("llm-0".to_owned(), 820)),
            sequence: 0,
            seed: 0,
            destinations: NonZeroUsize::MIN,
            sights: Vec::new(),
            output: 100.0,
            hot: 0.0,
            scale: 1.0,
            prices: Prices::default(),
        }
    }
}

/// A conversation whose home on a ring of `llm-0` to `llm-2` with 100 points each is `llm-0`.
const EXAMPLE_CONVERSATION: &str = "chat-42";
