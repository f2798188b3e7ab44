#![allow(
    clippy::disallowed_methods,
    reason = "owns the tasks of handshakes and of the certificate's reload"
)]
//! TLS for the ext_proc port: a self-signed certificate by default, or files that are read again when they change.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use arc_swap::ArcSwap;
use rcgen::{CertificateParams, DistinguishedName, DnType, KeyPair};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use tokio_rustls::rustls::server::{ClientHello, ResolvesServerCert};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Connected;

/// A peer that has not shaken hands by then is dropped.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often certificate files are looked at.
const RELOAD_INTERVAL: Duration = Duration::from_secs(5);

/// The certificate in use.
#[derive(Debug)]
pub struct Certificate(ArcSwap<CertifiedKey>);

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.load_full())
    }
}

impl Certificate {
    /// Makes a key and a certificate that nobody has signed: gateways do not verify pickers.
    ///
    /// # Errors
    /// The key cannot be made.
    pub fn self_signed() -> anyhow::Result<Arc<Self>> {
        let key = KeyPair::generate()?;
        let mut params =
            CertificateParams::new(vec!["llm-ring".to_owned(), "localhost".to_owned()])?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "llm-ring");
        let certificate = params.self_signed(&key)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(Arc::new(Self(ArcSwap::from_pointee(certified(vec![certificate.der().clone()], key)?))))
    }

    /// Reads PEM files.
    ///
    /// # Errors
    /// A file cannot be read, or does not hold what it should.
    pub fn from_files(cert: &Path, key: &Path) -> anyhow::Result<Arc<Self>> {
        Ok(Arc::new(Self(ArcSwap::from_pointee(read(cert, key)?))))
    }

    /// Follows the files for ever; a broken pair keeps the last good one.
    pub async fn follow(self: Arc<Self>, cert: PathBuf, key: PathBuf) {
        let contents = || (std::fs::read(&cert).ok(), std::fs::read(&key).ok());
        let mut seen = contents();
        let mut ticks = tokio::time::interval(RELOAD_INTERVAL);
        loop {
            ticks.tick().await;
            let now = contents();
            if now == seen {
                continue;
            }
            seen = now;
            match read(&cert, &key) {
                Ok(certified) => {
                    self.0.store(Arc::new(certified));
                    tracing::info!(cert = %cert.display(), "certificate reloaded");
                }
                Err(error) => {
                    tracing::warn!(error = format!("{error:#}"), "the certificate in use stays");
                }
            }
        }
    }
}

fn read(cert: &Path, key: &Path) -> anyhow::Result<CertifiedKey> {
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_file_iter(cert)
        .and_then(Iterator::collect)
        .with_context(|| format!("{}: not a PEM certificate chain", cert.display()))?;
    anyhow::ensure!(!chain.is_empty(), "{}: holds no certificate", cert.display());
    let key = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("{}: not a PEM private key", key.display()))?;
    certified(chain, key)
}

fn certified(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> anyhow::Result<CertifiedKey> {
    CertifiedKey::from_der(chain, key, &ring::default_provider())
        .context("the private key does not fit the certificate")
}

/// A connection, plain or secured: one type, so that the HTTP/2 server is compiled once.
#[derive(Debug)]
pub enum Io {
    /// Plaintext.
    Plain(TcpStream),
    /// TLS.
    Secure(Box<TlsStream<TcpStream>>),
}

/// Accepts connections; with a certificate it shakes hands, each in a task of its own so that a slow peer holds
/// nobody up.
///
/// # Errors
/// TLS cannot be set up.
pub fn incoming(
    listener: TcpListener,
    certificate: Option<Arc<Certificate>>,
) -> anyhow::Result<ReceiverStream<std::io::Result<Io>>> {
    let acceptor = certificate.map(acceptor).transpose()?;
    let (ready, incoming) = mpsc::channel(16);
    let strangers = Arc::new(Strangers::default());
    tokio::spawn(async move {
        loop {
            let connection = tokio::select! {
                connection = listener.accept() => connection,
                () = ready.closed() => return,
            };
            let Ok((stream, peer)) = connection else {
                // Out of file descriptors, for one: accepting again at once would spin.
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            // Without it every small answer waits for an acknowledgement.
            drop(stream.set_nodelay(true));
            let (acceptor, ready) = (acceptor.clone(), ready.clone());
            let strangers = Arc::clone(&strangers);
            tokio::spawn(async move {
                let (first, stream) = first_byte(stream).await;
                // Whatever it is, it speaks no HTTP/2 over what is spoken here; otherwise all that anybody would see
                // is that every request fails.
                match (first, acceptor) {
                    (Some(TLS_HANDSHAKE), None) => strangers.warn(
                        peer,
                        "a client speaks TLS to a port that is plain text: if it is a gateway at server.grpc_port, set tls.mode to `self-signed` or `files`, or have it speak plain text",
                    ),
                    (Some(HTTP2_PREFACE), Some(_)) => strangers.warn(
                        peer,
                        "a client speaks plain text to a port that speaks TLS: have the gateway speak TLS, or set tls.mode to \"off\"",
                    ),
                    (_, None) => drop(ready.send(Ok(Io::Plain(stream))).await),
                    (_, Some(acceptor)) => shake_hands(acceptor, stream, ready).await,
                }
            });
        }
    });
    Ok(ReceiverStream::new(incoming))
}

/// What TLS begins with: the record type of a ClientHello.
const TLS_HANDSHAKE: u8 = 0x16;
/// What HTTP/2 begins with: `PRI * HTTP/2.0`.
const HTTP2_PREFACE: u8 = b'P';

/// Looks at the first byte without taking it; `None` if none comes.
async fn first_byte(stream: TcpStream) -> (Option<u8>, TcpStream) {
    let mut byte = [0];
    let read = tokio::time::timeout(HANDSHAKE_TIMEOUT, stream.peek(&mut byte)).await;
    (matches!(read, Ok(Ok(1))).then_some(byte[0]), stream)
}

/// Warns of clients that speak something else, at most once a minute: each of their requests is a new attempt.
#[derive(Debug, Default)]
struct Strangers(Mutex<Option<Instant>>);

impl Strangers {
    fn warn(&self, peer: SocketAddr, message: &str) {
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if last.is_none_or(|last| last.elapsed() >= Duration::from_secs(60)) {
            *last = Some(Instant::now());
            tracing::warn!(%peer, "{message}");
        }
    }
}

fn acceptor(certificate: Arc<Certificate>) -> anyhow::Result<TlsAcceptor> {
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_no_client_auth()
        .with_cert_resolver(certificate);
    config.alpn_protocols = vec![b"h2".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn shake_hands(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    ready: mpsc::Sender<std::io::Result<Io>>,
) {
    match tokio::time::timeout(HANDSHAKE_TIMEOUT, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => drop(ready.send(Ok(Io::Secure(Box::new(stream)))).await),
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake failed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

impl Connected for Io {
    type ConnectInfo = ();

    fn connect_info(&self) -> Self::ConnectInfo {}
}

impl AsyncRead for Io {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Secure(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, buf),
            Self::Secure(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Self::Secure(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Secure(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Secure(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut *self {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Secure(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
