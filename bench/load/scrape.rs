//! What asking N engines for their metrics costs: CPU of this process alone, while another plays the engines.
//!
//! usage: `scrape COUNT PAGE [SECONDS [INTERVAL_MS]]`; `PAGE` is a file with a real `/metrics` page. It says what it
//! has used three times over, and the median. `scrape COUNT at PORT ...` asks engines that are there already, on ports
//! from `PORT` on. `scrape parse PAGE` times the reading of a page alone.
#![allow(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a program of the benchmark owns its tasks, and a fault may end it"
)]

use std::convert::Infallible;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::Response;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use llm_ring::engine::dialect::{Ranks, Reader};
use llm_ring::engine::scrape::{Scraper, Settings, Target};
use llm_ring::pool::{Endpoint, Engine};
use tokio::net::TcpListener;

/// Serves a page on `count` ports, and says which.
async fn serve(count: usize, page: Bytes) {
    let mut engines = tokio::task::JoinSet::new();
    for _ in 0..count {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        println!("{}", listener.local_addr().unwrap());
        let page = page.clone();
        engines.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                stream.set_nodelay(true).unwrap();
                let page = page.clone();
                tokio::spawn(async move {
                    let service = service_fn(|_| {
                        let page = page.clone();
                        async move { Ok::<_, Infallible>(Response::new(Full::new(page))) }
                    });
                    let http = hyper::server::conn::http1::Builder::new();
                    drop(http.serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
    }
    engines.join_all().await;
}

/// User and system time of this process, in ticks of 10 ms.
fn ticks() -> (u64, u64) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    (fields[11].parse().unwrap(), fields[12].parse().unwrap())
}

async fn measure(addresses: &[SocketAddr], seconds: u64, interval: Duration) {
    let epoch = Instant::now();
    let settings = Settings { interval, ..Settings::default() };
    let runtime = tokio::runtime::Handle::current();
    let mut scraper = Scraper::new(settings, epoch, runtime).unwrap();
    let targets: Vec<Target> = addresses
        .iter()
        .map(|&address| Target {
            id: Endpoint::new(address.to_string(), address).id(),
            address,
            engine: Engine::Unknown,
            ranks: Ranks::Summed,
        })
        .collect();
    let slots = scraper.set(&targets);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let scrapes = || slots.iter().map(|it| it.status().scrapes).sum::<u64>();
    let mut cores: Vec<f64> = Vec::new();
    for _ in 0..3 {
        let (began, before, asked) = (Instant::now(), ticks(), scrapes());
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        let (after, wall) = (ticks(), began.elapsed().as_secs_f64());
        let (user, system) = (after.0 - before.0, after.1 - before.1);
        let rate = (scrapes() - asked) as f64 / wall;
        let used = (user + system) as f64 / 100.0 / wall;
        println!(
            "{used:.3} cores ({:.3} user, {:.3} system), {rate:.0} scrapes/s, {:.1} us each",
            user as f64 / 100.0 / wall,
            system as f64 / 100.0 / wall,
            used / rate * 1e6,
        );
        cores.push(used);
    }
    cores.sort_by(f64::total_cmp);
    let now = epoch.elapsed();
    let fresh = slots.iter().filter(|slot| slot.signals(now).is_some()).count();
    let failing: Vec<String> =
        slots.iter().filter_map(|slot| slot.status().failure.map(|(_, text)| text)).collect();
    println!(
        "median {:.3} cores; {fresh} of {} fresh; failures: {failing:?}",
        cores[1],
        slots.len()
    );
}

/// Says how long a page takes, in processor time as far as that can be told: the least of many rounds.
fn parse(page: &[u8]) {
    const ROUND: u32 = 100;
    let mut reader = Reader::new(Engine::Unknown, Ranks::Summed);
    let least = (0..50)
        .map(|_| {
            let began = Instant::now();
            for _ in 0..ROUND {
                std::hint::black_box(reader.read(std::hint::black_box(page)));
            }
            began.elapsed() / ROUND
        })
        .min();
    println!("{} bytes: {:?}", page.len(), least.unwrap());
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments[0] == "serve" {
        let page = std::fs::read(&arguments[2]).unwrap();
        return serve(arguments[1].parse().unwrap(), page.into()).await;
    }
    if arguments[0] == "parse" {
        return parse(&std::fs::read(&arguments[1]).unwrap());
    }
    let count: usize = arguments[0].parse().unwrap();
    let there = arguments[1] == "at";
    let numbers = &arguments[if there { 3 } else { 2 }..];
    let number = |at: usize, default| numbers.get(at).map_or(default, |it| it.parse().unwrap());
    let (seconds, interval) = (number(0, 20), Duration::from_millis(number(1, 50)));
    if there {
        let port: u16 = arguments[2].parse().unwrap();
        let address = |at| SocketAddr::from(([127, 0, 0, 1], port + at));
        let addresses: Vec<SocketAddr> = (0..u16::try_from(count).unwrap()).map(address).collect();
        return measure(&addresses, seconds, interval).await;
    }
    let mut engines = Command::new(std::env::current_exe().unwrap())
        .args(["serve", &arguments[0], &arguments[1]])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(engines.stdout.take().unwrap()).lines();
    let addresses: Vec<SocketAddr> =
        lines.take(count).map(|line| line.unwrap().parse().unwrap()).collect();
    measure(&addresses, seconds, interval).await;
    engines.kill().unwrap();
    engines.wait().unwrap();
}
