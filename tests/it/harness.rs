//! What the tests run on: a stack of the real picker, real Envoys and scripted upstreams; every wait has a deadline,
//! every port is free, and nothing outlives the run.

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::task::AbortHandle;

pub(crate) mod client;
pub(crate) mod cluster;
pub(crate) mod envoy;
pub(crate) mod picker;
pub(crate) mod port;
pub(crate) mod process;
pub(crate) mod relay;
pub(crate) mod tools;
pub(crate) mod upstream;

use client::{Answer, Call};
use envoy::{Envoy, Front};
use picker::{Picker, endpoints};
use tools::Tools;
use upstream::{Gate, Seen, Upstream};

/// Nothing here takes half as long on a busy laptop.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Runs a test on the runtime that all share: what several tests use must outlive each of them.
pub(crate) fn run<T>(test: impl Future<Output = T>) -> T {
    static RUNTIME: LazyLock<Runtime> = LazyLock::new(|| Runtime::new().unwrap());
    RUNTIME.block_on(test)
}

/// Waits for something to come.
pub(crate) async fn within<T>(what: &str, something: impl Future<Output = T>) -> T {
    let came = tokio::time::timeout(DEADLINE, something).await;
    came.unwrap_or_else(|_| panic!("waited {DEADLINE:?} for {what}"))
}

/// Looks until there is something.
pub(crate) async fn eventually<T>(what: &str, look: impl AsyncFnMut() -> Option<T>) -> T {
    patiently(DEADLINE, what, look).await
}

/// The same for what may take longer.
pub(crate) async fn patiently<T>(
    patience: Duration,
    what: &str,
    mut look: impl AsyncFnMut() -> Option<T>,
) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(Instant::now() < deadline, "waited {patience:?} for {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A task that ends with its owner.
#[derive(Debug)]
pub(crate) struct AbortOnDrop(pub(crate) AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// A picker, its upstreams and the Envoys before it.
pub(crate) struct Stack {
    pub(crate) picker: Picker,
    pub(crate) upstreams: Vec<Upstream>,
    pub(crate) gate: Gate,
    pub(crate) envoys: Vec<Envoy>,
    /// Held by tests that look at what all requests together add up to.
    pub(crate) alone: tokio::sync::Mutex<()>,
}

/// The names of upstreams.
const NAMES: [&str; 3] = ["a", "b", "c"];

impl Stack {
    /// Starts all of it; `None` if there is no Envoy here.
    pub(crate) async fn start(config: &str, upstreams: usize, fronts: &[Front]) -> Option<Self> {
        let tools = Tools::get()?;
        let gate = Gate::closed();
        let mut started = Vec::new();
        for name in &NAMES[..upstreams] {
            started.push(Upstream::start(name, &gate).await);
        }
        let list = endpoints(started.iter().map(|it| (it.name.as_str(), it.address)));
        Some(Self::assemble(tools, config, &list, (started, gate), fronts).await)
    }

    /// Starts picker and Envoys over upstreams that run.
    pub(crate) async fn assemble(
        tools: &Tools,
        config: &str,
        list: &str,
        upstreams: (Vec<Upstream>, Gate),
        fronts: &[Front],
    ) -> Self {
        let hosts: Vec<SocketAddr> = upstreams.0.iter().map(|upstream| upstream.address).collect();
        Self::before(tools, config, list, upstreams, &hosts, fronts).await
    }

    /// The same before hosts that are not all upstreams of ours.
    pub(crate) async fn before(
        tools: &Tools,
        config: &str,
        list: &str,
        (upstreams, gate): (Vec<Upstream>, Gate),
        hosts: &[SocketAddr],
        fronts: &[Front],
    ) -> Self {
        let picker = Picker::start(config, list).await;
        let mut envoys = Vec::new();
        for front in fronts {
            envoys.push(Envoy::start(tools, *front, picker.grpc, hosts).await);
        }
        Self { picker, upstreams, gate, envoys, alone: tokio::sync::Mutex::default() }
    }

    /// Shows the logs of this stack if the test of this thread fails.
    pub(crate) fn watch(&self) -> &Self {
        self.picker.process.watch();
        self.envoys.iter().for_each(|envoy| envoy.process.watch());
        self
    }

    /// Where clients of the first Envoy go.
    pub(crate) fn port(&self) -> u16 {
        self.envoys[0].port
    }

    /// Sends a request through the first Envoy.
    pub(crate) async fn answer(&self, call: &Call) -> Answer {
        call.answer(self.port()).await
    }

    /// Returns the upstream that received the request, and what it received.
    #[track_caller]
    pub(crate) fn served(&self, id: &str) -> (&Upstream, Seen) {
        let mut found: Vec<_> = self
            .upstreams
            .iter()
            .flat_map(|upstream| upstream.seen(id).into_iter().map(move |seen| (upstream, seen)))
            .collect();
        assert_eq!(found.len(), 1, "upstreams received {id} that often");
        found.remove(0)
    }
}
