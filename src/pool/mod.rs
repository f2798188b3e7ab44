//! The vocabulary and the state of one InferencePool: endpoints, requests, load, and where conversations live.

pub mod endpoint;
pub mod estimate;
pub mod keeper;
pub mod load;
pub mod outcome;
pub mod placement;
pub mod prices;
pub mod queue;
pub mod request;
pub mod snapshot;

pub use endpoint::{Endpoint, EndpointId, Engine};
pub use keeper::{Change, PoolKeeper, Warmup};
pub use load::{Load, LoadLedger, MOST_TOKENS, Release, Ticket, Work};
pub use outcome::{Ending, Outcome, Usage};
pub use placement::{Placed, Placement};
pub use prices::Prices;
pub use queue::{AdapterState, Adapters, Decaying, EngineQueue, Flight, Pace, Place, Said, Sight};
pub use request::{Conversation, InferenceRequest, KeySource, PromptSize, TextBlocks};
pub use snapshot::{PoolError, PoolSnapshot};
