//! One model server of the pool.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use crate::index::hash;

/// Identifies one life of an endpoint: the same name at another address, or of another pod, is another endpoint, with
/// an empty cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EndpointId {
    place: u64,
    life: u64,
}

/// A model server that Envoy can dial.
#[derive(Debug, Clone, PartialEq)]
pub struct Endpoint {
    /// Name, unique in the pool; it is what the ring hashes.
    pub name: String,
    /// Where Envoy dials it.
    pub address: SocketAddr,
    /// Relative capacity, in (0, 100].
    pub weight: f64,
    /// Labels, as Kubernetes or the endpoints file gives them.
    pub labels: BTreeMap<String, String>,
    /// The model server's kind.
    pub engine: Engine,
    /// What tells one life of it from the next: the pod's uid. Empty where nothing says so.
    pub instance: String,
}

/// The kinds of model server whose answers and metrics are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Engine {
    /// Not said.
    #[default]
    Unknown,
    /// llama.cpp's `llama-server`.
    LlamaCpp,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// TensorRT-LLM.
    TrtLlm,
    /// Triton inference server.
    Triton,
}

impl Engine {
    /// Every kind, with the name that users write.
    pub const NAMES: [(&'static str, Self); 6] = [
        ("unknown", Self::Unknown),
        ("llama.cpp", Self::LlamaCpp),
        ("vllm", Self::Vllm),
        ("sglang", Self::Sglang),
        ("trt-llm", Self::TrtLlm),
        ("triton", Self::Triton),
    ];
}

/// Takes a weight above 0 and at most 100.
///
/// # Errors
/// Any other number; the text says what to do.
pub fn weight(weight: f64) -> Result<f64, String> {
    if weight > 0.0 && weight <= 100.0 {
        Ok(weight)
    } else {
        Err(format!(
            "a weight is above 0 and at most 100, not {weight}; to take an endpoint out, remove it"
        ))
    }
}

impl Endpoint {
    /// Makes an endpoint of weight 1 of which no more is known.
    #[must_use]
    pub fn new(name: impl Into<String>, address: SocketAddr) -> Self {
        Self {
            name: name.into(),
            address,
            weight: 1.0,
            labels: BTreeMap::new(),
            engine: Engine::Unknown,
            instance: String::new(),
        }
    }

    /// Returns the identity of this life of the endpoint.
    #[must_use]
    pub fn id(&self) -> EndpointId {
        let name = hash::hash(self.name.as_bytes());
        EndpointId {
            place: hash::mix(name, hash::hash(self.address.to_string().as_bytes())),
            life: hash::hash(self.instance.as_bytes()),
        }
    }
}

impl EndpointId {
    /// Returns a hash of name and address, for breaking ties: a record holds both, so that it can be decided again.
    #[must_use]
    pub fn hash(self) -> u64 {
        self.place
    }
}
