#![allow(
    clippy::disallowed_methods,
    reason = "owns the clock of scrapes, and a task for each endpoint"
)]
//! Asks model servers for their metrics: one loop an endpoint, at most one request under way in each, over a
//! connection that is kept.
//!
//! A loop is bounded in every direction: a time for connection and answer together, a size of the answer, no
//! redirect, no compression, longer waits after failures. What it hears goes into a [`Slot`], which a pick reads
//! without waiting. A slot that has heard nothing for a while says nothing: routing goes on without evidence.

use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::{
    ACCEPT, ACCEPT_ENCODING, AUTHORIZATION, CONTENT_ENCODING, HOST, HeaderValue, LOCATION,
};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::{Body as _, Incoming};
use hyper::client::conn::http1::{self, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::{
    CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{
    ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
};

use super::dialect::{Ranks, Reader, Reading, Signals};
use crate::pool::{EndpointId, Engine};

/// How engines are asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Time between two requests to one endpoint; at least [`LEAST_INTERVAL`].
    pub interval: Duration,
    /// Signals that are older are no evidence.
    pub stale_after: Duration,
    /// Most time for one scrape: connection, handshake and whole answer.
    pub timeout: Duration,
    /// Most bytes of an answer.
    pub most_bytes: usize,
    /// TLS, or plain text.
    pub tls: Option<Tls>,
    /// The port of all engines' metrics; the endpoint's own if not given.
    pub port: Option<u16>,
    /// The path; the engine's own if not given: `/metrics`, `/prometheus/metrics` for TensorRT-LLM.
    pub path: Option<String>,
    /// File that holds a bearer token; read again when it has changed.
    pub token_file: Option<PathBuf>,
}

/// The least [`Settings::interval`]: engines that are asked more often have been seen to suffer.
pub const LEAST_INTERVAL: Duration = Duration::from_millis(10);

impl Default for Settings {
    fn default() -> Self {
        Self {
            interval: Duration::from_millis(50),
            stale_after: Duration::from_secs(2),
            timeout: Duration::from_secs(1),
            most_bytes: 4 << 20,
            tls: None,
            port: None,
            path: None,
            token_file: None,
        }
    }
}

/// How engines are reached over TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tls {
    /// Whom to believe.
    pub trust: Trust,
    /// Name in the engines' certificates; the endpoint's IP address if not given.
    pub server_name: Option<String>,
}

/// Which certificates are believed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trust {
    /// Those signed by a CA of this PEM file, which is read again when it has changed.
    Ca(PathBuf),
    /// Any: encrypted, but from whom is not known.
    Anything,
}

/// Why engines cannot be asked as the settings say.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// Too often.
    #[error(
        "an interval of {0:?} is too short: at least {LEAST_INTERVAL:?}, since engines answer between their steps"
    )]
    Interval(Duration),
    /// No time to answer.
    #[error("a timeout of 0 leaves no time to answer: 1s is usual")]
    Timeout,
    /// Nothing would ever be fresh.
    #[error(
        "signals would be stale after {stale_after:?}, before the next are asked for: more than the interval of {interval:?}"
    )]
    Stale {
        /// The setting.
        stale_after: Duration,
        /// The other setting.
        interval: Duration,
    },
    /// No path.
    #[error("`{0}` is no path of a URL: it begins with `/`, as in `/metrics`")]
    Path(String),
    /// A file cannot be used.
    #[error("{0}")]
    File(String),
    /// No name that a certificate can have.
    #[error("`{0}` is no name of a server: a DNS name or an IP address")]
    ServerName(String),
    /// TLS cannot be set up.
    #[error("TLS cannot be set up")]
    Tls(#[source] TlsError),
}

/// An endpoint that is to be asked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    /// Its identity: another life of it is asked anew, and hears nothing of the old one's.
    pub id: EndpointId,
    /// Where it is.
    pub address: SocketAddr,
    /// What it is; [`Engine::Unknown`] is recognised from the metrics.
    pub engine: Engine,
    /// Which ranks' series are its own.
    pub ranks: Ranks,
}

/// How asking an endpoint goes, for operators.
#[derive(Debug, Clone, PartialEq)]
pub struct Status {
    /// Whose.
    pub id: EndpointId,
    /// What is asked.
    pub url: String,
    /// What the engine was named or recognised as.
    pub engine: Engine,
    /// When signals were last heard, since the epoch.
    pub success: Option<Duration>,
    /// The last failure: when, since the epoch, and what to do about it. It stays when asking goes well again.
    pub failure: Option<(Duration, String)>,
    /// Failures since the last success.
    pub failures: u32,
    /// Scrapes that were answered with signals.
    pub scrapes: u64,
    /// Lines that could not be read, in all.
    pub unread: u64,
    /// Values that cannot be, in all.
    pub nonsense: u64,
}

/// What was last heard of one endpoint. It outlives the endpoint as long as somebody holds it.
#[derive(Debug)]
pub struct Slot {
    stale_after: Duration,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    signals: Signals,
    status: Status,
}

impl Slot {
    /// Returns the signals, unless they are stale; `now` is since the epoch.
    #[must_use]
    pub fn signals(&self, now: Duration) -> Option<Signals> {
        let state = self.state();
        let age = now.saturating_sub(state.status.success?);
        (age <= self.stale_after).then(|| state.signals.clone())
    }

    /// Returns how asking goes.
    #[must_use]
    pub fn status(&self) -> Status {
        self.state().status.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn heard(&self, now: Duration, engine: Engine, reading: Reading) -> u32 {
        let mut state = self.state();
        state.signals = reading.signals;
        let status = &mut state.status;
        status.engine = engine;
        status.success = Some(now);
        status.scrapes += 1;
        status.unread = status.unread.saturating_add(reading.unread.into());
        status.nonsense = status.nonsense.saturating_add(reading.nonsense.into());
        std::mem::take(&mut status.failures)
    }

    fn failed(&self, now: Duration, text: String) -> u32 {
        let status = &mut self.state().status;
        status.failure = Some((now, text));
        status.failures = status.failures.saturating_add(1);
        status.failures
    }
}

/// Asks the endpoints it is given. Dropping it ends all loops.
#[derive(Debug)]
pub struct Scraper {
    access: Arc<Access>,
    epoch: Instant,
    runtime: Handle,
    loops: BTreeMap<EndpointId, Loop>,
    started: u32,
}

#[derive(Debug)]
struct Loop {
    target: Target,
    slot: Arc<Slot>,
    task: JoinHandle<()>,
}

impl Drop for Loop {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Scraper {
    /// Makes one that asks nobody yet; times are since `epoch`, and loops run on `runtime`.
    ///
    /// # Errors
    /// The settings contradict themselves, or a file they name cannot be used.
    pub fn new(settings: Settings, epoch: Instant, runtime: Handle) -> Result<Self, SettingsError> {
        let access = Arc::new(Access::new(settings)?);
        Ok(Self { access, epoch, runtime, loops: BTreeMap::new(), started: 0 })
    }

    /// Asks these endpoints from now on and no others. Loops of endpoints that stay as they are go on undisturbed.
    /// Returns what will be heard of each, in the order of `targets`.
    pub fn set(&mut self, targets: &[Target]) -> Vec<Arc<Slot>> {
        let mut before = std::mem::take(&mut self.loops);
        targets
            .iter()
            .map(|target| {
                let same = |it: &Loop| it.target == *target;
                let known = before.remove(&target.id).filter(same);
                let (started, access) = (&mut self.started, &self.access);
                let running = self.loops.entry(target.id).or_insert_with(|| {
                    known.unwrap_or_else(|| {
                        let asker = Asker::new(access, target, self.epoch, phase(*started));
                        *started = started.wrapping_add(1);
                        let slot = Arc::clone(&asker.slot);
                        let task = self.runtime.spawn(asker.run());
                        Loop { target: target.clone(), slot, task }
                    })
                });
                Arc::clone(&running.slot)
            })
            .collect()
    }

    /// Returns how asking goes, by endpoint.
    #[must_use]
    pub fn statuses(&self) -> Vec<Status> {
        self.loops.values().map(|it| it.slot.status()).collect()
    }
}

/// An interval is divided into so many points at which loops ask. Those of one point share its wake-up.
const POINTS: f64 = 10.0;

/// The share of the interval after which the n-th loop asks: multiples of the golden ratio lie far apart however many
/// there are, so that every point has its share of the loops.
fn phase(n: u32) -> f64 {
    let phase = (f64::from(n) * 0.618_033_988_749_895).fract();
    (phase * POINTS).floor() / POINTS
}

/// The first point after `now` of a grid with this interval that begins at `phase` of it.
fn next(now: Duration, interval: Duration, phase: f64) -> Duration {
    let offset = interval.mul_f64(phase);
    let Some(since) = now.checked_sub(offset) else {
        return offset;
    };
    let past = since.as_nanos() % interval.as_nanos().max(1);
    // Less than the interval, which is far below 500 years.
    now + interval.saturating_sub(Duration::from_nanos(u64::try_from(past).unwrap_or(0)))
}

/// What has to be read from files, read again when it has changed.
#[derive(Debug)]
struct Access {
    settings: Settings,
    keys: Mutex<Looked>,
}

/// How often files are looked at, and how soon after a failure.
const LOOK: Duration = Duration::from_secs(5);
const LOOK_AFTER_FAILURE: Duration = Duration::from_secs(1);

#[derive(Debug)]
struct Looked {
    at: Duration,
    files: Files,
    keys: Keys,
}

/// The files' contents.
#[derive(Debug, PartialEq, Eq, Default)]
struct Files {
    token: Option<Vec<u8>>,
    ca: Option<Vec<u8>>,
}

/// What the files say.
#[derive(Debug, Clone, Default)]
struct Keys {
    token: Option<HeaderValue>,
    tls: Option<Arc<ClientConfig>>,
}

impl Access {
    fn new(settings: Settings) -> Result<Self, SettingsError> {
        if settings.interval < LEAST_INTERVAL {
            return Err(SettingsError::Interval(settings.interval));
        }
        if settings.timeout.is_zero() {
            return Err(SettingsError::Timeout);
        }
        if settings.stale_after <= settings.interval {
            let Settings { stale_after, interval, .. } = settings;
            return Err(SettingsError::Stale { stale_after, interval });
        }
        if let Some(path) = &settings.path
            && (!path.starts_with('/') || path.parse::<http::uri::PathAndQuery>().is_err())
        {
            return Err(SettingsError::Path(path.clone()));
        }
        if let Some(name) = settings.tls.as_ref().and_then(|tls| tls.server_name.as_ref())
            && ServerName::try_from(name.as_str()).is_err()
        {
            return Err(SettingsError::ServerName(name.clone()));
        }
        let files = Files::read(&settings)?;
        let keys = files.keys(&settings)?;
        Ok(Self { settings, keys: Mutex::new(Looked { at: Duration::ZERO, files, keys }) })
    }

    /// Returns what the files say, as of a moment ago; files that cannot be used leave the last good ones in use.
    fn keys(&self, now: Duration, after_failure: bool) -> Keys {
        let mut looked = self.keys.lock().unwrap_or_else(PoisonError::into_inner);
        let age = if after_failure { LOOK_AFTER_FAILURE } else { LOOK };
        let Settings { tls, token_file, .. } = &self.settings;
        if (tls.is_some() || token_file.is_some()) && now.saturating_sub(looked.at) >= age {
            looked.at = now;
            let read = Files::read(&self.settings).and_then(|files| {
                let keys =
                    if files == looked.files { None } else { Some(files.keys(&self.settings)?) };
                Ok((files, keys))
            });
            match read {
                Ok((files, Some(keys))) => {
                    (looked.files, looked.keys) = (files, keys);
                    tracing::info!("the token or the CA for engines' metrics is read again");
                }
                Ok((_, None)) => {}
                Err(error) => {
                    tracing::warn!(%error, "what was last read for engines' metrics stays in use");
                }
            }
        }
        looked.keys.clone()
    }
}

impl Files {
    fn read(settings: &Settings) -> Result<Self, SettingsError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| {
                SettingsError::File(format!("{}: cannot be read: {error}", path.display()))
            })
        };
        let token = settings.token_file.as_deref().map(read).transpose()?;
        let ca = match &settings.tls {
            Some(Tls { trust: Trust::Ca(path), .. }) => Some(read(path)?),
            Some(Tls { trust: Trust::Anything, .. }) | None => None,
        };
        Ok(Self { token, ca })
    }

    fn keys(&self, settings: &Settings) -> Result<Keys, SettingsError> {
        let name = |path: &Option<PathBuf>| {
            path.as_ref().map(|path| path.display().to_string()).unwrap_or_default()
        };
        let token = match &self.token {
            None => None,
            Some(token) => {
                let token = token.trim_ascii();
                let header = [b"Bearer ", token].concat();
                let bad = || {
                    let path = name(&settings.token_file);
                    SettingsError::File(format!("{path}: holds no token: one line of visible text"))
                };
                let mut header = HeaderValue::from_bytes(&header).ok().ok_or_else(bad)?;
                if token.is_empty() {
                    return Err(bad());
                }
                header.set_sensitive(true);
                Some(header)
            }
        };
        let tls = settings.tls.as_ref().map(|tls| self.tls(&tls.trust)).transpose()?;
        Ok(Keys { token, tls })
    }

    fn tls(&self, trust: &Trust) -> Result<Arc<ClientConfig>, SettingsError> {
        let provider = Arc::new(ring::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(SettingsError::Tls)?;
        let mut config = match trust {
            Trust::Anything => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(Anybody(provider)))
                .with_no_client_auth(),
            Trust::Ca(path) => {
                let bad = |why: &dyn std::fmt::Display| {
                    SettingsError::File(format!("{}: {why}", path.display()))
                };
                let mut roots = RootCertStore::empty();
                let pem = self.ca.as_deref().unwrap_or_default();
                for certificate in CertificateDer::pem_slice_iter(pem) {
                    let certificate = certificate.map_err(|error| bad(&error))?;
                    roots.add(certificate).map_err(|error| bad(&error))?;
                }
                if roots.is_empty() {
                    return Err(bad(&"holds no certificate: PEM is expected"));
                }
                builder.with_root_certificates(roots).with_no_client_auth()
            }
        };
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

/// Believes every certificate, but not that somebody holds a key that they do not hold.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signature, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signature, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Why a scrape brought no signals; the text says what to do.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("cannot connect: {0}; does the engine listen there, and may this pod reach it?")]
    Connect(std::io::Error),
    #[error("the TLS handshake failed: {0}; {1}")]
    Tls(std::io::Error, &'static str),
    #[error(
        "no answer in HTTP/1.1: {0}; is it the engine's HTTP port, and TLS or not as configured?"
    )]
    Http(String),
    #[error("answered {0}; {1}")]
    Status(StatusCode, String),
    #[error(
        "the answer is compressed ({0:?}), which was not asked for: have the engine, or what is before it, send metrics as they are"
    )]
    Compressed(HeaderValue),
    #[error(
        "the answer has more than {0} bytes: raise the most that is read, if these are the engine's metrics"
    )]
    TooLarge(usize),
    #[error(
        "{0} within {1:?}: the engine is overloaded or hangs, or the timeout is too short for it"
    )]
    Slow(String, Duration),
    #[error(
        "the answer is JSON, not Prometheus text: it may be at another path (trtllm-serve: /prometheus/metrics)"
    )]
    Json,
    #[error(
        "no metric in it is of a known engine (vLLM, SGLang, llama.cpp, TensorRT-LLM, Triton): are port and path those of the engine's own metrics?"
    )]
    Unknown,
    #[error(
        "no metric in it is of {0}, as the engine is named: name another, or none so that it is recognised"
    )]
    Nothing(&'static str),
}

const NOT_THE_CA: &str = "the CA file must hold the CA of the engine's certificate, and the server name, or else the endpoint's address, must be in that certificate";
const NO_TLS: &str = "is it a port that speaks TLS?";

impl Failure {
    fn http(error: &hyper::Error) -> Self {
        let mut text = error.to_string();
        let mut source = std::error::Error::source(error);
        while let Some(error) = source {
            text = format!("{text}: {error}");
            source = error.source();
        }
        Self::Http(text)
    }

    fn status(response: &Response<Incoming>) -> Self {
        let status = response.status();
        let text = if status.is_redirection() {
            let place = response.headers().get(LOCATION).and_then(|it| it.to_str().ok());
            format!(
                "redirects are not followed: set scheme, port and path to where the metrics are ({})",
                place.unwrap_or("it does not say where")
            )
        } else if matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN) {
            "the engine wants a bearer token that allows reading metrics: set or renew the token file"
                .to_owned()
        } else if matches!(status, StatusCode::NOT_FOUND | StatusCode::NOT_IMPLEMENTED) {
            "start the engine with metrics (llama-server: --metrics, SGLang: --enable-metrics), or set the port and path where they are"
                .to_owned()
        } else {
            "see the engine's log".to_owned()
        };
        Self::Status(status, text)
    }
}

/// A stream of bytes, plain or secured: one type, so that the HTTP/1 client is compiled once.
trait Wire: AsyncRead + AsyncWrite + Send + Sync + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Wire for T {}

type Driven = Connection<TokioIo<Box<dyn Wire>>, Empty<Bytes>>;

/// A connection that is kept. The loop drives it itself: a task of its own would cost wake-ups between the two.
struct Link {
    sender: SendRequest<Empty<Bytes>>,
    /// `None` when it has ended.
    connection: Option<Pin<Box<Driven>>>,
}

/// Waits for `work`, with the connection going on meanwhile.
async fn drive<T>(connection: &mut Option<Pin<Box<Driven>>>, work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    poll_fn(|cx| {
        if let Poll::Ready(done) = work.as_mut().poll(cx) {
            return Poll::Ready(done);
        }
        let Some(driven) = connection else {
            return Poll::Pending;
        };
        // How it ends, the request that is under way hears.
        if driven.as_mut().poll(cx).is_ready() {
            *connection = None;
        }
        work.as_mut().poll(cx)
    })
    .await
}

/// The loop of one endpoint.
struct Asker {
    access: Arc<Access>,
    target: Target,
    slot: Arc<Slot>,
    epoch: Instant,
    phase: f64,
    address: SocketAddr,
    host: HeaderValue,
    path: http::Uri,
    reader: Reader,
    link: Option<Link>,
    page: Page,
    stage: Stage,
    failures: u32,
}

/// The body of an answer. One that comes in one piece, as most do, stays where hyper has read it.
#[derive(Debug, Default)]
struct Page {
    piece: Bytes,
    /// All pieces, if there are more than one; kept for the next answer.
    joined: Vec<u8>,
}

impl Page {
    fn clear(&mut self) {
        self.piece = Bytes::new();
        self.joined.clear();
    }

    fn push(&mut self, piece: &Bytes) {
        if self.bytes().is_empty() {
            self.piece = piece.clone();
            return;
        }
        if self.joined.is_empty() {
            self.joined.extend_from_slice(&std::mem::take(&mut self.piece));
        }
        self.joined.extend_from_slice(piece);
    }

    fn bytes(&self) -> &[u8] {
        if self.joined.is_empty() { &self.piece } else { &self.joined }
    }
}

/// How far a scrape has come.
#[derive(Debug, Clone, Copy)]
enum Stage {
    Connecting,
    Asking,
    Reading,
}

/// So many failures are told in the log: one alone is a hiccup.
const TOLD: u32 = 3;
/// The longest wait after failures.
const LONGEST_WAIT: Duration = Duration::from_secs(1);

impl Asker {
    fn new(access: &Arc<Access>, target: &Target, epoch: Instant, phase: f64) -> Self {
        let settings = &access.settings;
        let own = match target.engine {
            Engine::TrtLlm => "/prometheus/metrics",
            Engine::Unknown | Engine::LlamaCpp | Engine::Vllm | Engine::Sglang | Engine::Triton => {
                "/metrics"
            }
        };
        let path = settings.path.as_deref().unwrap_or(own);
        let mut address = target.address;
        address.set_port(settings.port.unwrap_or(address.port()));
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        let status = Status {
            id: target.id,
            url: format!("{scheme}://{address}{path}"),
            engine: target.engine,
            success: None,
            failure: None,
            failures: 0,
            scrapes: 0,
            unread: 0,
            nonsense: 0,
        };
        let slot = Slot {
            stale_after: settings.stale_after,
            state: Mutex::new(State { signals: Signals::default(), status }),
        };
        let named = settings.tls.as_ref().and_then(|tls| tls.server_name.as_ref());
        let host =
            named.map_or_else(|| address.to_string(), |name| format!("{name}:{}", address.port()));
        Self {
            access: Arc::clone(access),
            target: target.clone(),
            slot: Arc::new(slot),
            epoch,
            phase,
            address,
            host: HeaderValue::try_from(host)
                .expect("an address or a server's name is visible text"),
            path: path.parse().expect("a path is checked when settings are"),
            reader: Reader::new(target.engine, target.ranks),
            link: None,
            page: Page::default(),
            stage: Stage::Connecting,
            failures: 0,
        }
    }

    async fn run(mut self) {
        loop {
            self.wait().await;
            let timeout = self.access.settings.timeout;
            self.stage = Stage::Connecting;
            let asked = tokio::time::timeout(timeout, self.ask()).await;
            let result = asked.unwrap_or_else(|_| {
                let stage = match self.stage {
                    Stage::Connecting => "no connection".to_owned(),
                    Stage::Asking => "no answer".to_owned(),
                    Stage::Reading => {
                        format!("only {} bytes of the answer", self.page.bytes().len())
                    }
                };
                Err(Failure::Slow(stage, timeout))
            });
            let result = result.and_then(|()| self.read());
            let now = self.epoch.elapsed();
            match result {
                Ok(reading) => {
                    let failures = self.slot.heard(now, self.reader.engine(), reading);
                    self.failures = 0;
                    if failures >= TOLD {
                        tracing::info!(address = %self.address, failures, "the engine's metrics are heard again");
                    }
                }
                Err(failure) => {
                    // An answer that was not read to its end is still on its way.
                    self.link = None;
                    let text = failure.to_string();
                    if self.failures + 1 == TOLD {
                        tracing::warn!(address = %self.address, error = text, "the engine's metrics are not heard");
                    }
                    self.failures = self.slot.failed(now, text);
                }
            }
        }
    }

    /// Waits until it is time; longer after failures.
    async fn wait(&mut self) {
        let interval = self.access.settings.interval;
        let longer = interval.saturating_mul(1 << self.failures.min(16)).min(LONGEST_WAIT);
        let from = self.epoch.elapsed() + longer.saturating_sub(interval);
        let sleep =
            tokio::time::sleep_until((self.epoch + next(from, interval, self.phase)).into());
        match &mut self.link {
            Some(link) => drive(&mut link.connection, sleep).await,
            None => sleep.await,
        }
    }

    /// Asks for the page, over the connection that is there or a new one.
    async fn ask(&mut self) -> Result<(), Failure> {
        let keys = self.access.keys(self.epoch.elapsed(), self.failures > 0);
        if let Some(link) =
            self.link.take_if(|link| link.connection.is_some() && !link.sender.is_closed())
        {
            match self.request(link, &keys).await {
                Err(Failure::Http(_)) if !matches!(self.stage, Stage::Reading) => {
                    // The engine closed it just now: whether it answers shows on a new one.
                }
                other => return other,
            }
        }
        self.stage = Stage::Connecting;
        let link = self.connect(&keys).await?;
        self.request(link, &keys).await
    }

    async fn connect(&self, keys: &Keys) -> Result<Link, Failure> {
        let stream = TcpStream::connect(self.address).await.map_err(Failure::Connect)?;
        stream.set_nodelay(true).map_err(Failure::Connect)?;
        let wire: Box<dyn Wire> = match (&keys.tls, &self.access.settings.tls) {
            (Some(config), Some(tls)) => {
                let name = match &tls.server_name {
                    Some(name) => ServerName::try_from(name.clone())
                        .expect("a server's name is checked when settings are"),
                    None => ServerName::IpAddress(self.address.ip().into()),
                };
                let connector = TlsConnector::from(Arc::clone(config));
                let stream = connector.connect(name, stream).await.map_err(|error| {
                    let certificate = error.to_string().contains("certificate");
                    Failure::Tls(error, if certificate { NOT_THE_CA } else { NO_TLS })
                })?;
                Box::new(stream)
            }
            _ => Box::new(stream),
        };
        let (sender, connection) =
            http1::handshake(TokioIo::new(wire)).await.map_err(|error| Failure::http(&error))?;
        Ok(Link { sender, connection: Some(Box::pin(connection)) })
    }

    /// Fills the page; keeps the connection if all went well.
    async fn request(&mut self, mut link: Link, keys: &Keys) -> Result<(), Failure> {
        self.stage = Stage::Asking;
        self.page.clear();
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = self.path.clone();
        let headers = request.headers_mut();
        headers.insert(HOST, self.host.clone());
        headers.insert(ACCEPT, HeaderValue::from_static("text/plain;version=0.0.4"));
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        if let Some(token) = &keys.token {
            headers.insert(AUTHORIZATION, token.clone());
        }
        let Link { sender, connection } = &mut link;
        let answer = async {
            sender.ready().await?;
            sender.send_request(request).await
        };
        let response = drive(connection, answer).await.map_err(|error| Failure::http(&error))?;
        if response.status() != StatusCode::OK {
            return Err(Failure::status(&response));
        }
        if let Some(encoding) = response.headers().get(CONTENT_ENCODING)
            && encoding != "identity"
        {
            return Err(Failure::Compressed(encoding.clone()));
        }
        self.stage = Stage::Reading;
        let most = self.access.settings.most_bytes;
        let mut body = response.into_body();
        if body.size_hint().lower() > most as u64 {
            return Err(Failure::TooLarge(most));
        }
        while let Some(frame) = drive(connection, body.frame()).await {
            let frame = frame.map_err(|error| Failure::http(&error))?;
            if let Some(data) = frame.data_ref() {
                if self.page.bytes().len() + data.len() > most {
                    return Err(Failure::TooLarge(most));
                }
                self.page.push(data);
            }
        }
        self.link = Some(link);
        Ok(())
    }

    fn read(&mut self) -> Result<Reading, Failure> {
        let reading = self.reader.read(self.page.bytes());
        if !reading.signals.is_empty() {
            // Hyper reads the next one into the same memory only if nobody holds this one.
            self.page.clear();
            return Ok(reading);
        }
        let text = self.page.bytes().trim_ascii();
        Err(if text.starts_with(b"[") || text.starts_with(b"{\"") && text.ends_with(b"}") {
            Failure::Json
        } else if self.target.engine == Engine::Unknown {
            Failure::Unknown
        } else {
            let engine = self.target.engine;
            let name = Engine::NAMES.iter().find(|(_, it)| *it == engine).map(|&(name, _)| name);
            Failure::Nothing(name.unwrap_or("it"))
        })
    }
}

#[cfg(test)]
mod tests;
