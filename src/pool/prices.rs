//! What work costs on an engine, in seconds: a step of continuous batching computes a budget of prompt tokens and one
//! token for each answer under way.
//!
//! A step takes `overhead + max(floor, prefill × prompt tokens + decode × answers) + quadratic × attention of the
//! prompts + context × tokens that the answers look back on`.

/// Prices of one kind of engine on one kind of machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// Seconds that every step takes.
    pub overhead: f64,
    /// Seconds that the model's weights take to be read, in every step.
    pub floor: f64,
    /// Seconds for a prompt token.
    pub prefill: f64,
    /// Seconds for an answer in a step.
    pub decode: f64,
    /// Seconds for a prompt token and a token before it.
    pub quadratic: f64,
    /// Seconds for a token that answers look back on, in a step.
    pub context: f64,
    /// Tokens that a step computes at most.
    pub budget: f64,
    /// Requests that run at the same time at most.
    pub sequences: f64,
    /// Tokens that the KV cache holds.
    pub capacity: f64,
}

impl Default for Prices {
    /// A 32B model on two H100 (roofline and published measurements). What matters are the proportions: how fast an
    /// endpoint really is gets learned.
    fn default() -> Self {
        Self {
            overhead: 1.5e-3,
            floor: 9.5e-3,
            prefill: 7.5e-5,
            decode: 7.5e-5,
            quadratic: 2.65e-9,
            context: 5.2e-8,
            budget: 8192.0,
            sequences: 1024.0,
            capacity: 307_328.0,
        }
    }
}

impl Prices {
    /// Returns the seconds that `new` prompt tokens after `cached` ones take by themselves.
    #[must_use]
    pub fn prompt(&self, new: f64, cached: f64) -> f64 {
        self.prefill * new + self.quadratic * new * (cached + new * 0.5)
    }

    /// Returns the seconds to the first token of a request that starts now, beside `answers` that look back on
    /// `contexts` tokens together.
    #[must_use]
    pub fn first_token(&self, new: f64, cached: f64, answers: f64, contexts: f64) -> f64 {
        let budget = (self.budget - answers).max(1.0);
        let steps = (new / budget).ceil().max(1.0);
        let full = new * self.prefill + steps * self.decode * answers;
        let full = if new < budget { full.max(self.floor) } else { full };
        steps * (self.overhead + self.context * contexts)
            + full
            + self.quadratic * new * (cached + new * 0.5)
    }

    /// Returns the seconds of a step that computes no prompt.
    #[must_use]
    pub fn step(&self, answers: f64, contexts: f64) -> f64 {
        self.overhead + self.floor.max(self.decode * answers) + self.context * contexts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_waits_for_as_many_steps_as_it_needs() {
        let prices = Prices::default();
        let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
        // Little work still costs a step, and a step the reading of the weights.
        near(prices.first_token(16.0, 0.0, 0.0, 0.0), 1.5e-3 + 9.5e-3 + 2.65e-9 * 16.0 * 8.0);
        let two = prices.first_token(10_000.0, 0.0, 0.0, 0.0);
        near(two, 2.0 * 1.5e-3 + 0.75 + 2.65e-9 * 10_000.0 * 5_000.0);
        assert!(prices.first_token(10_000.0, 0.0, 100.0, 1e6) > two);
        near(prices.step(0.0, 0.0), 1.5e-3 + 9.5e-3);
    }
}
