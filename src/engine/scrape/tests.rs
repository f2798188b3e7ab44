//! A scraper and engines that misbehave, over real sockets.

use std::sync::atomic::{AtomicUsize, Ordering};

use proptest::prelude::*;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

use super::*;
use crate::pool::Endpoint;

const PAGE: &str = include_str!("../testdata/vllm-0.32.0.txt");
const INTERVAL: Duration = Duration::from_millis(10);

/// What an engine does with a request.
#[derive(Clone)]
enum Answer {
    /// Sends these bytes and goes on.
    Send(Vec<u8>),
    /// Sends these bytes and closes.
    Close(Vec<u8>),
    /// Sends these bytes, then a byte at a time for ever.
    Drip(Vec<u8>),
    /// Waits, then sends a page.
    After(Duration),
    /// A page, if the request holds this text; 401 if not.
    IfHas(String),
}

fn page(text: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: {}\r\n\r\n{text}",
        text.len()
    )
    .into_bytes()
}

fn waiting(requests: u64) -> Vec<u8> {
    page(&format!("vllm:num_requests_waiting {requests}\n"))
}

fn status(line: &str) -> Vec<u8> {
    format!("HTTP/1.1 {line}\r\ncontent-length: 0\r\n\r\n").into_bytes()
}

/// An engine on a port of its own.
struct Played {
    address: SocketAddr,
    told: Arc<Told>,
    task: JoinHandle<()>,
}

struct Told {
    answer: Mutex<Answer>,
    heads: Mutex<Vec<String>>,
    connections: AtomicUsize,
    /// Requests under way, and the most there were.
    now: AtomicUsize,
    most: AtomicUsize,
}

impl Drop for Played {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Played {
    async fn new(answer: Answer) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap(), answer, None)
    }

    fn on(listener: TcpListener, answer: Answer, tls: Option<TlsAcceptor>) -> Self {
        let address = listener.local_addr().unwrap();
        let told = Arc::new(Told {
            answer: Mutex::new(answer),
            heads: Mutex::default(),
            connections: AtomicUsize::new(0),
            now: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        });
        let shared = Arc::clone(&told);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                shared.connections.fetch_add(1, Ordering::Relaxed);
                let (told, tls) = (Arc::clone(&shared), tls.clone());
                connections.spawn(async move {
                    match tls {
                        None => told.serve(stream).await,
                        Some(tls) => match tls.accept(stream).await {
                            Ok(stream) => told.serve(stream).await,
                            Err(_) => Some(()),
                        },
                    }
                });
            }
        });
        Self { address, told, task }
    }

    fn answers(&self, answer: Answer) {
        *self.told.answer.lock().unwrap() = answer;
    }

    fn requests(&self) -> usize {
        self.told.heads.lock().unwrap().len()
    }

    fn connections(&self) -> usize {
        self.told.connections.load(Ordering::Relaxed)
    }

    fn target(&self) -> Target {
        target(self.address, Engine::Unknown)
    }
}

impl Told {
    /// Serves until the other side ends it; nobody looks at how.
    async fn serve(&self, mut stream: impl AsyncRead + AsyncWrite + Send + Unpin) -> Option<()> {
        loop {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(stream.read_u8().await.ok()?);
            }
            let head = String::from_utf8(head).unwrap();
            self.heads.lock().unwrap().push(head.clone());
            let now = self.now.fetch_add(1, Ordering::Relaxed) + 1;
            self.most.fetch_max(now, Ordering::Relaxed);
            let answer = self.answer.lock().unwrap().clone();
            let open = self.answer(&mut stream, answer, &head).await;
            self.now.fetch_sub(1, Ordering::Relaxed);
            open?;
        }
    }

    async fn answer(
        &self,
        stream: &mut (impl AsyncRead + AsyncWrite + Send + Unpin),
        answer: Answer,
        head: &str,
    ) -> Option<()> {
        match answer {
            Answer::Send(bytes) => stream.write_all(&bytes).await.ok()?,
            Answer::Close(bytes) => {
                stream.write_all(&bytes).await.ok()?;
                stream.shutdown().await.ok()?;
                return None;
            }
            Answer::Drip(bytes) => {
                stream.write_all(&bytes).await.ok()?;
                loop {
                    tokio::time::sleep(INTERVAL).await;
                    stream.write_all(b"#").await.ok()?;
                }
            }
            Answer::After(time) => {
                tokio::time::sleep(time).await;
                stream.write_all(&waiting(1)).await.ok()?;
            }
            Answer::IfHas(text) => {
                let answer =
                    if head.contains(&text) { waiting(2) } else { status("401 Unauthorized") };
                stream.write_all(&answer).await.ok()?;
            }
        }
        Some(())
    }
}

fn target(address: SocketAddr, engine: Engine) -> Target {
    Target { id: Endpoint::new("engine", address).id(), address, engine, ranks: Ranks::Summed }
}

fn settings() -> Settings {
    Settings {
        interval: INTERVAL,
        timeout: Duration::from_millis(300),
        stale_after: Duration::from_millis(700),
        ..Settings::default()
    }
}

fn scraper(settings: Settings) -> Scraper {
    Scraper::new(settings, Instant::now(), Handle::current()).unwrap()
}

/// Waits for what has to come about; the machine may be busy.
async fn until(what: &str, mut come: impl FnMut() -> bool) {
    let began = Instant::now();
    while !come() {
        assert!(began.elapsed() < Duration::from_secs(20), "{what}: it did not come about");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Asks with these settings until it has failed; returns the text.
async fn failure(settings: Settings, target: Target) -> String {
    let mut scraper = scraper(settings);
    let slot = scraper.set(&[target]).remove(0);
    until("a failure", || slot.status().failures > 0).await;
    assert_eq!((slot.signals(Duration::ZERO), slot.status().success), (None, None));
    slot.status().failure.unwrap().1
}

#[tokio::test]
async fn one_connection_carries_all_requests() {
    let engine = Played::new(Answer::Send(page(PAGE))).await;
    let mut scraper = scraper(settings());
    let slot = scraper.set(&[engine.target()]).remove(0);
    until("ten scrapes", || slot.status().scrapes >= 10).await;
    let status = slot.status();
    assert_eq!((status.engine, status.failures, status.failure), (Engine::Vllm, 0, None));
    assert_eq!(status.url, format!("http://{}/metrics", engine.address));
    assert_eq!(slot.signals(status.success.unwrap()).unwrap().blocks, Some(16384));
    assert_eq!(engine.connections(), 1);
    let head = engine.told.heads.lock().unwrap()[0].to_ascii_lowercase();
    assert!(head.starts_with("get /metrics http/1.1\r\n"), "{head}");
    for line in [
        &format!("host: {}", engine.address),
        "accept: text/plain;version=0.0.4",
        "accept-encoding: identity",
    ] {
        assert!(head.contains(line), "{head}");
    }
}

#[tokio::test]
async fn a_closed_connection_is_no_failure() {
    let said =
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nvllm:num_requests_waiting 1\n".to_vec();
    for answer in [Answer::Close(said), Answer::Close(waiting(1))] {
        let engine = Played::new(answer).await;
        let mut scraper = scraper(settings());
        let slot = scraper.set(&[engine.target()]).remove(0);
        until("ten scrapes", || slot.status().scrapes >= 10).await;
        assert_eq!(slot.status().failure, None);
        assert!(engine.connections() >= 10);
    }
}

#[tokio::test]
async fn chunks_are_joined() {
    let mut answer = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
    for chunk in PAGE.as_bytes().chunks(777) {
        answer.extend(format!("{:x}\r\n", chunk.len()).into_bytes());
        answer.extend(chunk);
        answer.extend(b"\r\n");
    }
    answer.extend(b"0\r\n\r\n");
    let engine = Played::new(Answer::Send(answer)).await;
    let mut scraper = scraper(settings());
    let slot = scraper.set(&[engine.target()]).remove(0);
    until("three scrapes", || slot.status().scrapes >= 3).await;
    assert_eq!(slot.signals(Duration::ZERO).unwrap().prefix_queries, Some(934));
    assert_eq!((slot.status().unread, engine.connections()), (0, 1));
}

#[tokio::test]
async fn a_failure_says_what_to_do() {
    let elsewhere = Played::new(Answer::Send(waiting(1))).await;
    let redirect = format!("302 Found\r\nlocation: http://{}/metrics", elsewhere.address);
    let encoded = "HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n\x1f.";
    let large = "HTTP/1.1 200 OK\r\ncontent-length: 100000000\r\n\r\n";
    let half = "HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nvllm:num_requests_waiting 1\n";
    let chunked = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
    let endless = format!("{chunked}{}", format!("400\r\n{}\r\n", "#".repeat(1024)).repeat(5000));
    for (answer, words) in [
        (Answer::Send(status(&redirect)), &["302", "not followed", "http://127.0.0.1"][..]),
        (Answer::Send(status("401 Unauthorized")), &["401", "token file"]),
        (Answer::Send(status("404 Not Found")), &["404", "--metrics", "port and path"]),
        (Answer::Send(status("500 Internal Server Error")), &["500", "log"]),
        (Answer::Send(page("[]")), &["JSON", "/prometheus/metrics"]),
        (Answer::Send(page("<html>\n</html>\n")), &["known engine"]),
        (Answer::Send(page("")), &["known engine"]),
        (Answer::Send(encoded.into()), &["compressed", "gzip"]),
        (Answer::Send(large.into()), &["more than 4194304 bytes"]),
        (Answer::Send(endless.into()), &["more than 4194304 bytes"]),
        (Answer::Close(half.into()), &["no answer in HTTP/1.1", "end of file"]),
        (Answer::Close(Vec::new()), &["no answer in HTTP/1.1"]),
        (Answer::Send(b"SSH-2.0-x\r\n\r\n".to_vec()), &["no answer in HTTP/1.1"]),
        (Answer::After(Duration::from_secs(60)), &["no answer within 300ms", "overloaded"]),
        (Answer::Drip(large.replace("100000000", "1000").into()), &["bytes of the answer within"]),
    ] {
        let engine = Played::new(answer).await;
        let text = failure(settings(), engine.target()).await;
        for word in words {
            assert!(text.contains(word), "`{text}` does not say `{word}`");
        }
    }
    assert_eq!(elsewhere.connections(), 0, "a redirect was followed");
    let engine = Played::new(Answer::Send(page(PAGE))).await;
    let text = failure(settings(), target(engine.address, Engine::Sglang)).await;
    assert!(text.contains("of sglang, as the engine is named"), "{text}");
}

#[tokio::test]
async fn an_engine_that_comes_up_is_heard_and_one_that_hangs_goes_stale() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let epoch = Instant::now();
    let mut scraper = Scraper::new(settings(), epoch, Handle::current()).unwrap();
    let slot = scraper.set(&[target(address, Engine::Unknown)]).remove(0);
    until("failures", || slot.status().failures >= 3).await;
    let text = slot.status().failure.unwrap().1;
    assert!(text.contains("cannot connect") && text.contains("does the engine listen"), "{text}");

    let engine =
        Played::on(TcpListener::bind(address).await.unwrap(), Answer::Send(waiting(5)), None);
    until("signals", || slot.signals(epoch.elapsed()).is_some()).await;
    assert_eq!(slot.signals(epoch.elapsed()).unwrap().waiting, Some(5));
    until("no failure in a row", || slot.status().failures == 0).await;

    engine.answers(Answer::After(Duration::from_secs(60)));
    until("staleness", || slot.signals(epoch.elapsed()).is_none()).await;
    let status = slot.status();
    assert!(status.success.is_some() && status.failures > 0, "{status:?}");
    assert_eq!(slot.signals(status.success.unwrap()).unwrap().waiting, Some(5));

    engine.answers(Answer::Send(waiting(6)));
    until("signals again", || slot.signals(epoch.elapsed()).is_some()).await;
    assert_eq!(slot.signals(epoch.elapsed()).unwrap().waiting, Some(6));
}

#[tokio::test]
async fn a_slow_engine_has_one_request_at_a_time() {
    let engine = Played::new(Answer::After(Duration::from_millis(60))).await;
    let mut scraper = scraper(settings());
    let slot = scraper.set(&[engine.target()]).remove(0);
    until("five scrapes", || slot.status().scrapes >= 5).await;
    assert_eq!(engine.told.most.load(Ordering::Relaxed), 1);
    assert_eq!(slot.status().failure, None);
}

#[tokio::test]
async fn a_changed_token_is_read_again() {
    let folder = std::env::temp_dir().join(format!("llm-ring-scrape-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("token");
    std::fs::write(&file, "first\n").unwrap();
    let engine = Played::new(Answer::IfHas("authorization: Bearer first\r\n".to_owned())).await;
    let settings = Settings { token_file: Some(file.clone()), ..settings() };
    let mut scraper = scraper(settings.clone());
    let slot = scraper.set(&[engine.target()]).remove(0);
    until("an answer to the first", || slot.status().scrapes > 0).await;

    engine.answers(Answer::IfHas("authorization: Bearer second\r\n".to_owned()));
    until("a refusal", || slot.status().failures > 0).await;
    assert!(slot.status().failure.unwrap().1.contains("401"));
    // A broken file leaves the token as it is; a good one is taken up.
    std::fs::write(&file, "two\nlines").unwrap();
    until("more refusals", || slot.status().failures > 8).await;
    std::fs::write(&file, "second").unwrap();
    let before = slot.status().scrapes;
    until("an answer to the second", || slot.status().scrapes > before).await;

    std::fs::write(&file, "\n").unwrap();
    let error = Scraper::new(settings.clone(), Instant::now(), Handle::current()).unwrap_err();
    assert!(error.to_string().contains("holds no token"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
    let error = Scraper::new(settings, Instant::now(), Handle::current()).unwrap_err();
    assert!(error.to_string().contains("cannot be read"), "{error}");
}

#[tokio::test]
async fn endpoints_come_and_go() {
    let (a, b) =
        (Played::new(Answer::Send(waiting(1))).await, Played::new(Answer::Send(waiting(2))).await);
    let mut scraper = scraper(settings());
    let first = scraper.set(&[a.target(), b.target()]);
    until("both", || first.iter().all(|slot| slot.status().scrapes > 2)).await;
    let heard: Vec<_> =
        first.iter().map(|slot| slot.signals(Duration::ZERO).unwrap().waiting).collect();
    assert_eq!(heard, [Some(1), Some(2)]);

    // b goes, a stays as it is.
    let second = scraper.set(&[a.target()]);
    assert!(Arc::ptr_eq(&first[0], &second[0]));
    assert_eq!(scraper.statuses().len(), 1);
    until("the end of b", || b.told.now.load(Ordering::Relaxed) == 0).await;
    let (asked, of_a) = (b.requests(), a.requests());
    until("more of a", || a.requests() > of_a + 10).await;
    assert!(b.requests() <= asked + 1, "b is still asked");
    assert_eq!(a.connections(), 1);

    // b comes back, as another life: nothing is known of it yet.
    let life = Target {
        id: Endpoint { instance: "uid-2".to_owned(), ..Endpoint::new("engine", b.address) }.id(),
        ..b.target()
    };
    let third = scraper.set(&[life.clone(), a.target()]);
    assert_eq!(third[0].signals(Duration::ZERO), None);
    assert!(Arc::ptr_eq(&first[0], &third[1]));
    until("b again", || third[0].status().scrapes > 0).await;

    // A name for the engine makes the loop anew.
    let fourth = scraper.set(&[Target { engine: Engine::Vllm, ..life }, a.target()]);
    assert!(!Arc::ptr_eq(&third[0], &fourth[0]));
    drop(scraper);
    until("the end of a", || Arc::strong_count(&first[0]) == 4).await;
}

#[tokio::test]
async fn port_and_path_are_as_configured_or_the_engines_own() {
    let engine = Played::new(Answer::Send(page("trtllm_num_requests_waiting 1\n"))).await;
    let mut nowhere = engine.address;
    nowhere.set_port(1);
    let asked = Settings {
        port: Some(engine.address.port()),
        path: Some("/a/path?and=query".to_owned()),
        ..settings()
    };
    let mut configured = scraper(asked);
    let slot = configured.set(&[target(nowhere, Engine::TrtLlm)]).remove(0);
    until("an answer", || slot.status().scrapes > 0).await;
    drop(configured);
    let mut own = scraper(settings());
    let slot = own.set(&[target(engine.address, Engine::TrtLlm)]).remove(0);
    until("an answer", || slot.status().scrapes > 0).await;
    let heads = engine.told.heads.lock().unwrap();
    assert!(heads.first().unwrap().starts_with("GET /a/path?and=query HTTP"), "{heads:?}");
    assert!(heads.last().unwrap().starts_with("GET /prometheus/metrics HTTP"), "{heads:?}");
}

/// A CA as PEM, and a server with a certificate of it for `name`.
fn certified(name: &str) -> (String, TlsAcceptor) {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let certificate =
        CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &ca).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(
            vec![certificate.der().clone()],
            PrivateKeyDer::Pkcs8(key.serialize_der().into()),
        )
        .unwrap();
    (ca.pem(), TlsAcceptor::from(Arc::new(config)))
}

#[tokio::test]
async fn tls_believes_the_ca_of_the_file() {
    let folder = std::env::temp_dir().join(format!("llm-ring-scrape-tls-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("ca.pem");
    let listener = || TcpListener::bind("127.0.0.1:0");
    let played = |listener, tls| Played::on(listener, Answer::Send(page(PAGE)), Some(tls));
    let tls = |trust, server_name: Option<&str>| Settings {
        tls: Some(Tls { trust, server_name: server_name.map(str::to_owned) }),
        timeout: Duration::from_secs(5),
        ..settings()
    };
    let works = async |settings, engine: &Played| {
        let mut scraper = scraper(settings);
        let slot = scraper.set(&[engine.target()]).remove(0);
        until("answers", || slot.status().scrapes > 2).await;
        assert_eq!((slot.status().failure, engine.connections()), (None, 1));
    };

    let (ca, acceptor) = certified("127.0.0.1");
    std::fs::write(&file, &ca).unwrap();
    let engine = played(listener().await.unwrap(), acceptor);
    works(tls(Trust::Ca(file.clone()), None), &engine).await;

    let (ca, acceptor) = certified("engine.example");
    let engine = played(listener().await.unwrap(), acceptor.clone());
    let text = failure(tls(Trust::Ca(file.clone()), Some("engine.example")), engine.target()).await;
    assert!(text.contains("the CA of the engine's certificate"), "{text}");
    std::fs::write(&file, &ca).unwrap();
    let text = failure(tls(Trust::Ca(file.clone()), None), engine.target()).await;
    assert!(text.contains("must be in that certificate"), "{text}");
    let engine = played(listener().await.unwrap(), acceptor.clone());
    works(tls(Trust::Ca(file.clone()), Some("engine.example")), &engine).await;
    let engine = played(listener().await.unwrap(), acceptor);
    works(tls(Trust::Anything, None), &engine).await;

    let plain = Played::new(Answer::Send(page(PAGE))).await;
    plain.answers(Answer::Send(page(PAGE)));
    let text = failure(
        Settings { timeout: Duration::from_millis(300), ..tls(Trust::Anything, None) },
        plain.target(),
    )
    .await;
    assert!(text.contains("no connection within") || text.contains("speaks TLS"), "{text}");

    std::fs::write(&file, "no certificate").unwrap();
    let settings = tls(Trust::Ca(file), None);
    let error = Scraper::new(settings, Instant::now(), Handle::current()).unwrap_err();
    assert!(error.to_string().contains("holds no certificate"), "{error}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused() {
    let default = Settings::default;
    let millis = Duration::from_millis;
    for (settings, words) in [
        (Settings { interval: millis(9), ..default() }, "at least 10ms"),
        (Settings { timeout: Duration::ZERO, ..default() }, "leaves no time"),
        (Settings { stale_after: millis(50), ..default() }, "stale"),
        (Settings { path: Some("metrics".to_owned()), ..default() }, "begins with `/`"),
        (Settings { path: Some("/a b".to_owned()), ..default() }, "begins with `/`"),
        (
            Settings {
                tls: Some(Tls { trust: Trust::Anything, server_name: Some("a b".to_owned()) }),
                ..default()
            },
            "no name of a server",
        ),
    ] {
        let error = Scraper::new(settings, Instant::now(), Handle::current()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn loops_are_spread_over_the_interval() {
    for count in [10, 100, 1000] {
        let mut loops = [0; 10];
        for n in 0..count {
            let point = (0..10_u8).find(|&at| (phase(n) * POINTS - f64::from(at)).abs() < 0.5);
            loops[usize::from(point.unwrap())] += 1;
        }
        let (least, most) = (loops.iter().min().unwrap(), loops.iter().max().unwrap());
        assert!(most - least <= 2, "{loops:?}");
    }
}

proptest! {
    #[test]
    fn the_next_point_is_the_first_of_the_grid(
        now in 0..10_000_000_000_u64, interval in 10_000_000..1_000_000_000_u64, phase in 0.0..1.0_f64,
    ) {
        let (now, interval) = (Duration::from_nanos(now), Duration::from_nanos(interval));
        let next = next(now, interval, phase);
        prop_assert!(next > now);
        let offset = interval.mul_f64(phase);
        prop_assert!(next <= (now + interval).max(offset));
        prop_assert_eq!((next - offset).as_nanos() % interval.as_nanos(), 0);
    }
}
