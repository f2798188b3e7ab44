//! The endpoints of the pool at one moment: immutable, replaced whole, shared by reference.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use super::{Endpoint, EndpointId};
use crate::index::rendezvous::Rendezvous;
use crate::index::ring::{HashRing, Member};

/// One version of the pool, with everything that is computed from its membership alone.
#[derive(Debug, Default)]
pub struct PoolSnapshot {
    version: u64,
    endpoints: Vec<Endpoint>,
    ids: Vec<EndpointId>,
    /// Apart from the endpoints, since scans over all of them need nothing else.
    weights: Vec<f64>,
    ring: HashRing,
    rendezvous: Rendezvous,
    slots: HashMap<EndpointId, u32>,
    addresses: HashMap<SocketAddr, u32>,
    weight: f64,
    points: u32,
}

/// Why a list of endpoints is not a pool.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Two endpoints have one name.
    #[error("two endpoints are named `{0}`: names must be unique, because the ring hashes them")]
    DuplicateName(String),
    /// Two endpoints have one address.
    #[error("endpoints `{0}` and `{1}` have the same address {2}")]
    DuplicateAddress(String, String, SocketAddr),
}

impl PoolSnapshot {
    /// Sorts the endpoints by name and builds the ring with `points` virtual nodes for each unit of weight.
    ///
    /// # Errors
    /// Two endpoints share a name or an address.
    pub fn new(version: u64, mut endpoints: Vec<Endpoint>, points: u32) -> Result<Self, PoolError> {
        Self::check(&endpoints)?;
        endpoints.sort_by(|a, b| a.name.cmp(&b.name));
        let addresses = by_address(&endpoints)?;
        let members = || {
            endpoints
                .iter()
                .map(|endpoint| Member { name: &endpoint.name, weight: endpoint.weight })
        };
        let (ring, rendezvous) = (HashRing::new(members(), points), Rendezvous::new(members()));
        let ids: Vec<EndpointId> = endpoints.iter().map(Endpoint::id).collect();
        Ok(Self {
            version,
            points,
            ring,
            rendezvous,
            slots: ids.iter().copied().zip(0..).collect(),
            weights: endpoints.iter().map(|endpoint| endpoint.weight).collect(),
            weight: endpoints.iter().map(|endpoint| endpoint.weight).sum(),
            ids,
            addresses,
            endpoints,
        })
    }

    /// Makes a pool of no endpoints.
    #[must_use]
    pub fn empty(points: u32) -> Self {
        Self { points, ..Self::default() }
    }

    /// Tells whether endpoints make a pool.
    ///
    /// # Errors
    /// Two endpoints share a name or an address.
    pub fn check(endpoints: &[Endpoint]) -> Result<(), PoolError> {
        let mut names = HashSet::with_capacity(endpoints.len());
        if let Some(twice) = endpoints.iter().find(|it| !names.insert(&it.name)) {
            return Err(PoolError::DuplicateName(twice.name.clone()));
        }
        by_address(endpoints).map(drop)
    }

    /// Counts the changes of membership and of weights since the start.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Returns the endpoints in the order of their names; a slot is an index into it.
    #[must_use]
    pub fn endpoints(&self) -> &[Endpoint] {
        &self.endpoints
    }

    /// Returns the identities, in slot order.
    #[must_use]
    pub fn ids(&self) -> &[EndpointId] {
        &self.ids
    }

    /// Returns the endpoint in a slot.
    ///
    /// # Panics
    /// The slot is of another snapshot.
    #[must_use]
    pub fn endpoint(&self, slot: u32) -> &Endpoint {
        &self.endpoints[slot as usize]
    }

    /// Finds the slot of an identity.
    #[must_use]
    pub fn slot_of(&self, id: EndpointId) -> Option<u32> {
        self.slots.get(&id).copied()
    }

    /// Finds the slot of an address.
    #[must_use]
    pub fn slot_at(&self, address: SocketAddr) -> Option<u32> {
        self.addresses.get(&address).copied()
    }

    /// Finds the slots that an entry of a subset hint means: port 0 is any port of its address.
    pub fn slots_at(&self, address: SocketAddr) -> impl Iterator<Item = u32> + '_ {
        let is_there = move |endpoint: &Endpoint| endpoint.address.ip() == address.ip();
        let any = (address.port() == 0).then(|| {
            let slots = (0u32..).zip(&self.endpoints);
            slots.filter(move |(_, endpoint)| is_there(endpoint)).map(|(slot, _)| slot)
        });
        self.slot_at(address).into_iter().chain(any.into_iter().flatten())
    }

    /// Counts the keys whose home on the ring is another endpoint in `after`, or another life of the same.
    #[must_use]
    pub fn homes_moved(&self, after: &Self, keys: &[u64]) -> u64 {
        let home = |pool: &Self, key| Some(pool.ids[pool.ring.home(key)? as usize]);
        let moved = keys.iter().filter(|&&key| home(self, key) != home(after, key)).count();
        u64::try_from(moved).unwrap_or(u64::MAX)
    }

    /// Returns the ring.
    #[must_use]
    pub fn ring(&self) -> &HashRing {
        &self.ring
    }

    /// Returns the rendezvous hash.
    #[must_use]
    pub fn rendezvous(&self) -> &Rendezvous {
        &self.rendezvous
    }

    /// Returns the virtual nodes for each unit of weight.
    #[must_use]
    pub fn ring_points(&self) -> u32 {
        self.points
    }

    /// Returns the weight of the endpoint in a slot.
    ///
    /// # Panics
    /// The slot is of another snapshot.
    #[must_use]
    pub fn weight_of(&self, slot: u32) -> f64 {
        self.weights[slot as usize]
    }

    /// Returns the sum of all weights.
    #[must_use]
    pub fn weight(&self) -> f64 {
        self.weight
    }
}

/// Finds the index of each address.
fn by_address(endpoints: &[Endpoint]) -> Result<HashMap<SocketAddr, u32>, PoolError> {
    let mut addresses = HashMap::with_capacity(endpoints.len());
    for (index, endpoint) in (0u32..).zip(endpoints) {
        if let Some(first) = addresses.insert(endpoint.address, index) {
            let first: &Endpoint = &endpoints[first as usize];
            return Err(PoolError::DuplicateAddress(
                first.name.clone(),
                endpoint.name.clone(),
                endpoint.address,
            ));
        }
    }
    Ok(addresses)
}
