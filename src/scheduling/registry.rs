//! Every policy by name, with its parameters: one line here and one file in `policy/` make a new one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::Policy;

/// Makes the table of policies: configuration key, what else it is called, field and type of its parameters, which are
/// the policy itself.
macro_rules! policies {
    ($($name:literal $(| $alias:literal)? $field:ident: $policy:ty, $summary:literal;)*) => {
        /// The parameters of every policy; a default stands in the policy's own file.
        #[derive(Debug, Clone, PartialEq, Default, Deserialize, Serialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Policies {
            $(
                #[doc = $summary]
                #[serde(rename = $name $(, alias = $alias)?)]
                pub $field: $policy,
            )*
        }

        /// The name and the summary of every policy, in the order of the documentation.
        pub const POLICIES: &[(&str, &str)] = &[$(($name, $summary)),*];

        /// What else policies are called, and their names.
        pub const ALIASES: &[(&str, &str)] = &[$($(($alias, $name),)?)*];

        /// Returns the name of the policy that is called so.
        #[must_use]
        pub fn named(name: &str) -> Option<&'static str> {
            match name {
                $($name $(| $alias)? => Some($name),)*
                _ => None,
            }
        }

        impl Policies {
            /// Returns the policy that is called so, and its name as the registry holds it.
            #[must_use]
            pub fn get(&self, name: &str) -> Option<(&'static str, Arc<dyn Policy>)> {
                match named(name)? {
                    $($name => Some(($name, Arc::new(self.$field.clone()))),)*
                    _ => None,
                }
            }
        }
    };
}

policies! {
    "random" random: super::policy::random::Random, "an endpoint by chance; the baseline of baselines";
    "round-robin" round_robin: super::policy::round_robin::RoundRobin, "each endpoint in turn; spreads requests, forgets conversations";
    "mod-n" mod_n: super::policy::mod_n::ModN, "the conversation's hash modulo the number of endpoints; a change of membership moves nearly everything";
    "least-loaded" least_loaded: super::policy::least_loaded::LeastLoaded, "the endpoint with the least work for its weight";
    "consistent" consistent: super::policy::consistent::Consistent, "the conversation's home on a hash ring; a change of membership moves only the changed endpoint's share";
    "rendezvous" rendezvous: super::policy::rendezvous::Rendezvous, "highest-random-weight hash: exact weights, and the lightest of the best `choices`";
    "bounded" bounded: super::policy::bounded::Bounded, "consistent hashing with bounded loads: home, unless it carries more than (1 + epsilon) times the average";
    "llm-aware" llm_aware: super::policy::llm_aware::LlmAware, "bounded loads in tokens of actual work, with placement memory and patience for long cached conversations";
    "marginal-cost" marginal_cost: super::policy::marginal_cost::MarginalCost, "where the request costs least, in seconds: its own wait, and what its work takes from everybody else";
    "weighted" weighted: super::policy::weighted::Weighted, "filters, a weighted sum of scores, and a picker, as the Inference Extension's and llm-d's pickers have them";
    "load-aware" | "loadaware" load_aware: super::policy::load_aware::LoadAware, "the share of the prompt that is cached, less beta times the excess of requests over the mean";
    "kv-aware" | "kvaware" kv_aware: super::policy::kv_aware::KvAware, "where most of the prompt is cached, whatever the load, unless too much of it is cached nowhere";
    "prefix-aware" | "prefixaware" prefix_aware: super::policy::prefix_aware::PrefixAware, "by chance among those that have the longest prefix, whatever the load";
}
