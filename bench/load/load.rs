//! Seeded chats to one address, in a closed or an open loop; prints one JSON object: latency quantiles in
//! milliseconds, errors, the spread over engines, and the CPU and memory of named processes.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program of the benchmark owns its tasks and its clock, and a fault may end it"
)]

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use clap::Parser;
use http_body_util::{BodyExt as _, Full};
use hyper::Request;
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// After this long without an answer a request has failed.
const PATIENCE: Duration = Duration::from_secs(60);
const WORDS: [&str; 19] = [
    "the",
    "cluster",
    "keeps",
    "processed",
    "conversation",
    "history",
    "in",
    "memory",
    "so",
    "that",
    "next",
    "turn",
    "is",
    "quick",
    "and",
    "cheap",
    "when",
    "routed",
    "well",
];

#[derive(Debug, Parser)]
struct Arguments {
    /// Where requests go
    address: SocketAddr,
    /// Bytes of a body
    #[arg(long, default_value_t = 4096)]
    size: usize,
    /// Requests a second, at random moments; 0: a closed loop
    #[arg(long, default_value_t = 0.0)]
    rate: f64,
    /// Clients of a closed loop
    #[arg(long, default_value_t = 16)]
    clients: u64,
    /// Seconds that are measured
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seconds before them
    #[arg(long, default_value_t = 2.0)]
    warm_up: f64,
    /// Asks for answers as events
    #[arg(long)]
    stream: bool,
    /// Distinct conversations
    #[arg(long, default_value_t = 200)]
    conversations: usize,
    /// Share of a body that all conversations have in common
    #[arg(long, default_value_t = 0.3)]
    shared: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// A process to watch, as NAME=PID
    #[arg(long = "pid", value_parser = named_pid)]
    pids: Vec<(String, u32)>,
}

/// What all requests share.
struct Traffic {
    address: SocketAddr,
    bodies: Vec<Bytes>,
    idle: Mutex<Vec<SendRequest<Full<Bytes>>>>,
    tally: Mutex<Tally>,
}

#[derive(Default)]
struct Tally {
    latencies_ms: Vec<f64>,
    codes: BTreeMap<String, u64>,
    spread: BTreeMap<String, u64>,
    wrong_lengths: u64,
    bytes: u64,
}

/// One answer.
struct Answer {
    status: u16,
    backend: String,
    /// Whether the engine saw the body at its full length.
    right_length: bool,
    bytes: usize,
}

/// SplitMix64: as good as the choice of a conversation needs.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % n as u64).unwrap()
    }

    /// Draws from (0, 1].
    fn share(&mut self) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "53 bits are enough")]
        let share = ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64;
        share
    }
}

impl Traffic {
    fn new(arguments: &Arguments) -> Self {
        let mut draws = Draws(arguments.seed);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            clippy::cast_precision_loss,
            reason = "a share of a body's length"
        )]
        let common = (arguments.size as f64 * arguments.shared) as usize;
        let system = text(&mut draws, common);
        let bodies = (0..arguments.conversations).map(|i| {
            let user = text(&mut draws, arguments.size.saturating_sub(common + 150).max(1));
            let stream = if arguments.stream { r#""stream":true,"# } else { "" };
            Bytes::from(format!(
                r#"{{{stream}"model":"tiny","messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{i} {user}"}}],"max_tokens":4}}"#
            ))
        });
        Self {
            address: arguments.address,
            bodies: bodies.collect(),
            idle: Mutex::default(),
            tally: Mutex::default(),
        }
    }

    /// Sends one request and counts what came of it; its latency runs from `due`.
    async fn one(&self, conversation: usize, due: Instant) {
        let answer = tokio::time::timeout(PATIENCE, self.ask(conversation)).await;
        let latency_ms = due.elapsed().as_secs_f64() * 1000.0;
        let mut tally = self.tally.lock().unwrap();
        let code = match answer {
            Ok(Ok(answer)) => {
                if answer.status == 200 {
                    tally.latencies_ms.push(latency_ms);
                    tally.bytes += answer.bytes as u64;
                    tally.wrong_lengths += u64::from(!answer.right_length);
                    *tally.spread.entry(answer.backend).or_default() += 1;
                }
                answer.status.to_string()
            }
            Ok(Err(error)) => format!("error: {error}"),
            Err(_) => "no answer".to_owned(),
        };
        *tally.codes.entry(code).or_default() += 1;
    }

    async fn ask(&self, conversation: usize) -> Result<Answer, Box<dyn std::error::Error>> {
        let idle = self.idle.lock().unwrap().pop();
        let mut connection = match idle {
            Some(connection) if connection.is_ready() => connection,
            Some(_) | None => connect(self.address).await?,
        };
        let body = self.bodies[conversation].clone();
        let sent = body.len();
        let request = Request::post("/v1/chat/completions")
            .header("host", "bench")
            .header("content-type", "application/json")
            .header("x-session-id", format!("s{conversation}"))
            .body(Full::new(body))?;
        let mut response = connection.send_request(request).await?;
        let mut bytes = 0;
        while let Some(frame) = response.body_mut().frame().await {
            bytes += frame?.data_ref().map_or(0, Bytes::len);
        }
        let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
        let answer = Answer {
            status: response.status().as_u16(),
            backend: header("x-backend").unwrap_or_default().to_owned(),
            right_length: header("x-got") == Some(&sent.to_string()),
            bytes,
        };
        if connection.ready().await.is_ok() {
            self.idle.lock().unwrap().push(connection);
        }
        Ok(answer)
    }
}

async fn connect(
    address: SocketAddr,
) -> Result<SendRequest<Full<Bytes>>, Box<dyn std::error::Error>> {
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    tokio::spawn(connection);
    Ok(sender)
}

/// Sends for `seconds` and waits for the last answer.
async fn run(traffic: &Arc<Traffic>, arguments: &Arguments, seconds: f64, seed: u64) {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let requests = if arguments.rate > 0.0 {
        open_loop(Arc::clone(traffic), arguments.rate, end, seed).await
    } else {
        (0..arguments.clients)
            .map(|client| {
                let traffic = Arc::clone(traffic);
                let mut draws = Draws(seed.wrapping_add(client.wrapping_mul(0x5851_f42d)));
                tokio::spawn(async move {
                    while Instant::now() < end {
                        traffic.one(draws.below(traffic.bodies.len()), Instant::now()).await;
                    }
                })
            })
            .collect()
    };
    for request in requests {
        request.await.unwrap();
    }
}

/// Starts requests at random moments, from a thread: the runtime's own timer is a millisecond coarse.
async fn open_loop(
    traffic: Arc<Traffic>,
    rate: f64,
    end: Instant,
    seed: u64,
) -> Vec<tokio::task::JoinHandle<()>> {
    let runtime = tokio::runtime::Handle::current();
    let pace = move || {
        let (mut draws, mut requests, mut due) = (Draws(seed), Vec::new(), Instant::now());
        while due < end {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let (traffic, conversation) = (Arc::clone(&traffic), draws.below(traffic.bodies.len()));
            requests.push(runtime.spawn(async move { traffic.one(conversation, due).await }));
            due += Duration::from_secs_f64(-draws.share().ln() / rate);
        }
        requests
    };
    tokio::task::spawn_blocking(pace).await.unwrap()
}

fn text(draws: &mut Draws, length: usize) -> String {
    let mut text = String::with_capacity(length + 16);
    while text.len() < length {
        text.push_str(WORDS[draws.below(WORDS.len())]);
        text.push(' ');
    }
    text.truncate(length);
    text
}

fn named_pid(text: &str) -> Result<(String, u32), String> {
    let (name, pid) = text.split_once('=').ok_or("as in picker=123")?;
    Ok((name.to_owned(), pid.parse().map_err(|error| format!("{error}"))?))
}

/// CPU seconds of a process so far; the kernel counts them in hundredths (`man 5 proc_pid_stat`).
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    after_name
        .split_whitespace()
        .skip(11)
        .take(2)
        .filter_map(|ticks| ticks.parse::<f64>().ok())
        .sum::<f64>()
        / 100.0
}

fn rss_mib(pid: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.split_whitespace().next().and_then(|kib| kib.parse::<f64>().ok()).unwrap_or_default()
        / 1024.0
}

fn report(mut tally: Tally, seconds: f64, pids: &[(String, u32)], before: &[f64]) -> Value {
    tally.latencies_ms.sort_unstable_by(f64::total_cmp);
    let count = tally.latencies_ms.len();
    let quantile = |per_mille: usize| {
        let at = (count * per_mille / 1000).min(count.saturating_sub(1));
        tally.latencies_ms.get(at).copied().unwrap_or_default()
    };
    #[expect(clippy::cast_precision_loss, reason = "a count of requests")]
    let requests = count as f64;
    let processes = pids.iter().zip(before).map(|((name, pid), before)| {
        let cpu = cpu_seconds(*pid) - before;
        let usage = json!({
            "cpu_ms_per_request": cpu * 1000.0 / requests.max(1.0),
            "cores": cpu / seconds,
            "rss_mib": rss_mib(*pid),
        });
        (name.clone(), usage)
    });
    json!({
        "seconds": seconds,
        "requests": count,
        "per_second": requests / seconds,
        "p50": quantile(500),
        "p90": quantile(900),
        "p95": quantile(950),
        "p99": quantile(990),
        "max": quantile(1000),
        "codes": tally.codes,
        "spread": tally.spread,
        "wrong_lengths": tally.wrong_lengths,
        "answer_bytes": tally.bytes,
        "processes": processes.collect::<serde_json::Map<String, Value>>(),
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments = Arguments::parse();
    let traffic = Arc::new(Traffic::new(&arguments));
    run(&traffic, &arguments, arguments.warm_up, arguments.seed.wrapping_add(1)).await;
    drop(std::mem::take(&mut *traffic.tally.lock().unwrap()));

    let before: Vec<f64> = arguments.pids.iter().map(|&(_, pid)| cpu_seconds(pid)).collect();
    let begun = Instant::now();
    run(&traffic, &arguments, arguments.seconds, arguments.seed.wrapping_add(2)).await;
    let seconds = begun.elapsed().as_secs_f64();
    let tally = std::mem::take(&mut *traffic.tally.lock().unwrap());
    println!("{}", report(tally, seconds, &arguments.pids, &before));
}
