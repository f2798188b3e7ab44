//! The running stack: engines, the picker, and Envoy in front; ready when it is returned, gone when it is dropped.
#![allow(clippy::disallowed_methods, reason = "it waits for others to be ready")]

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hyper::StatusCode;
use serde_json::{Value, json};

use super::client::{page, post};
use super::parts::{Engine, Parts};
use super::plan::Member;
use super::process::Process;
use super::stream::Usage;
use super::text::{Tokenizer, WORDS};

/// Nothing takes half as long on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// Whoever else is given an engine's port in the meantime makes it end: then it is started again with another.
const STARTS: usize = 4;

/// A policy as the picker's configuration has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Policy {
    pub(crate) name: String,
    /// As YAML, in braces.
    pub(crate) parameters: String,
}

pub(crate) struct Stack {
    /// Where clients go.
    pub(crate) port: u16,
    folder: PathBuf,
    // Dropped in this order: the gateway first, which is the engines' client.
    envoy: Process,
    picker: Process,
    engines: Vec<Running>,
}

struct Running {
    process: Process,
    port: u16,
    killed: bool,
}

impl Stack {
    /// Starts engines, of which `members` may be chosen at first, and the rest; logs and configurations go into a folder.
    ///
    /// # Errors
    /// A part does not start; the error shows the end of its log.
    pub(crate) async fn start(
        parts: &Parts,
        engine: Engine,
        (processes, members): (usize, &[Member]),
        policy: &Policy,
        folder: &Path,
    ) -> Result<Self> {
        std::fs::create_dir_all(folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        // Names of files are read from other folders than ours.
        let folder = folder.canonicalize()?;
        let engines = engines(parts, engine, processes, &folder).await?;
        write_endpoints(&folder, members, &engines)?;
        let (picker, grpc) = picker(parts, policy, &folder).await?;
        let (envoy, port) = envoy(parts, grpc, &folder).await?;
        Ok(Self { port, folder, envoy, picker, engines })
    }

    /// Changes who may be chosen, in the file that the picker watches.
    pub(crate) fn set_members(&self, members: &[Member]) -> Result<()> {
        write_endpoints(&self.folder, members, &self.engines)
    }

    pub(crate) fn kill(&mut self, process: usize) {
        let engine = &mut self.engines[process];
        engine.killed = true;
        engine.process.kill();
    }

    /// # Errors
    /// A part ended by itself.
    pub(crate) fn check(&mut self) -> Result<()> {
        self.envoy.check()?;
        self.picker.check()?;
        let running = self.engines.iter_mut().filter(|engine| !engine.killed);
        running.map(|engine| &mut engine.process).try_for_each(Process::check)
    }

    /// Returns the ends of all logs, for an error.
    pub(crate) fn tails(&self) -> String {
        let engines = self.engines.iter().map(|engine| &engine.process);
        [&self.envoy, &self.picker].into_iter().chain(engines).map(Process::tail).collect()
    }

    /// Asks an engine what its model makes of texts; each engine answers a short chat, so that none is cold.
    ///
    /// # Errors
    /// It does not say what it counts.
    pub(crate) async fn tokenizer(&self) -> Result<Tokenizer> {
        let mut counted = Vec::new();
        for engine in &self.engines {
            counted = vec![
                chat(engine.port, &[" a"]).await?,
                chat(engine.port, &[" a", " a", " a"]).await?,
            ];
        }
        let port = self.engines[0].port;
        let mut words = Vec::new();
        for word in WORDS {
            let word = format!(" {word}");
            let answer = post(port, "/tokenize", &json!({ "content": word })).await?;
            if answer["tokens"].as_array().is_some_and(|tokens| tokens.len() == 1) {
                words.push(word);
            }
        }
        if words.len() < 8 {
            bail!(
                "the model knows only {} of {} short words as one token",
                words.len(),
                WORDS.len()
            );
        }
        let opening = counted[0].prompt.saturating_sub(1);
        let around = counted[1].prompt.saturating_sub(opening + 3);
        Ok(Tokenizer { words, opening, around })
    }
}

async fn chat(port: u16, texts: &[&str]) -> Result<Usage> {
    let role = |at: usize| if at.is_multiple_of(2) { "user" } else { "assistant" };
    let message = |(at, text): (usize, &&str)| json!({ "role": role(at), "content": text });
    let messages: Vec<Value> = texts.iter().enumerate().map(message).collect();
    let body = json!({ "messages": messages, "max_tokens": 1, "temperature": 0 });
    let answer = post(port, "/v1/chat/completions", &body).await?;
    let usage = Usage::of(&answer).context("the engine does not say what it counts")?;
    usage.cached.context("the engine does not say what it found in its cache")?;
    Ok(usage)
}

async fn engines(
    parts: &Parts,
    engine: Engine,
    count: usize,
    folder: &Path,
) -> Result<Vec<Running>> {
    let start = |number: usize, port: u16| {
        let process =
            Process::start(&format!("engine-{number}"), &mut parts.engine(port, engine), folder)?;
        anyhow::Ok(Running { process, port, killed: false })
    };
    let ports = free_ports(count)?;
    let mut engines = Vec::new();
    for (number, port) in ports.into_iter().enumerate() {
        engines.push(start(number, port)?);
    }
    for (number, engine) in engines.iter_mut().enumerate() {
        let mut starts = 1;
        let deadline = Instant::now() + PATIENCE;
        while !answers(engine.port, "/health").await {
            if engine.process.ended()? {
                if starts == STARTS {
                    engine.process.check()?;
                }
                starts += 1;
                *engine = start(number, free_ports(1)?[0])?;
            }
            wait(deadline, &format!("engine {number}"), &engine.process).await?;
        }
    }
    Ok(engines)
}

async fn picker(parts: &Parts, policy: &Policy, folder: &Path) -> Result<(Process, u16)> {
    let Policy { name, parameters } = policy;
    let endpoints = json!(folder.join("endpoints.yaml"));
    let config = format!(
        "server: {{ address: 127.0.0.1, grpc_port: 0, health_port: 0, metrics_port: 0 }}\n\
         tls: {{ mode: \"off\" }}\n\
         endpoints: {{ file: {endpoints}, poll_ms: 50 }}\n\
         policy: {name}\n\
         policies: {{ {name}: {parameters} }}\n\
         drain: {{ linger_seconds: 0 }}\n"
    );
    let file = folder.join("llm-ring.yaml");
    std::fs::write(&file, config)?;
    let mut command = std::process::Command::new(&parts.picker);
    let mut process =
        Process::start("llm-ring", command.arg("serve").arg("--config").arg(&file), folder)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let line = |line: &str| {
            let line: Value = serde_json::from_str(line).ok()?;
            let port = |key: &str| Some(line[key].as_str()?.parse::<SocketAddr>().ok()?.port());
            (line["message"] == "serving").then(|| Some((port("grpc")?, port("metrics")?)))?
        };
        if let Some((grpc, metrics)) = process.log().lines().find_map(line)
            && answers(metrics, "/readyz").await
        {
            return Ok((process, grpc));
        }
        process.check()?;
        wait(deadline, "the picker", &process).await?;
    }
}

async fn envoy(parts: &Parts, picker_port: u16, folder: &Path) -> Result<(Process, u16)> {
    let (file, address) = (folder.join("envoy.yaml"), folder.join("envoy-admin"));
    std::fs::write(&file, parts.envoy_config(picker_port)?)?;
    let mut command = parts.envoy();
    command.arg("--config-path").arg(&file).arg("--admin-address-path").arg(&address);
    // Without --disable-hot-restart two Envoys on one machine are one too many.
    command.args(["--concurrency", "1", "--log-level", "warning", "--disable-hot-restart"]);
    let mut process = Process::start("envoy", &mut command, folder)?;
    let deadline = Instant::now() + PATIENCE;
    loop {
        let admin = std::fs::read_to_string(&address).ok();
        let admin = admin.and_then(|text| text.trim().parse::<SocketAddr>().ok());
        if let Some(admin) = admin
            && answers(admin.port(), "/ready").await
        {
            let (_, listeners) = page(admin.port(), "/listeners?format=json").await?;
            let listeners: Value = serde_json::from_str(&listeners)?;
            let address = &listeners["listener_statuses"][0]["local_address"]["socket_address"];
            let port = address["port_value"].as_u64().and_then(|port| u16::try_from(port).ok());
            return Ok((process, port.context("Envoy does not say where it listens")?));
        }
        process.check()?;
        wait(deadline, "Envoy", &process).await?;
    }
}

async fn answers(port: u16, path: &str) -> bool {
    page(port, path).await.is_ok_and(|(status, _)| status == StatusCode::OK)
}

async fn wait(deadline: Instant, what: &str, process: &Process) -> Result<()> {
    if Instant::now() > deadline {
        bail!("{what} is not ready after {} s{}", PATIENCE.as_secs(), process.tail());
    }
    tokio::time::sleep(Duration::from_millis(50)).await;
    Ok(())
}

/// Finds ports that nobody listens on, held all at once so that they differ.
fn free_ports(count: usize) -> Result<Vec<u16>> {
    let listeners: Vec<TcpListener> =
        (0..count).map(|_| TcpListener::bind("127.0.0.1:0")).collect::<Result<_, _>>()?;
    let port = |listener: &TcpListener| Ok(listener.local_addr()?.port());
    listeners.iter().map(port).collect()
}

/// Names an endpoint to the picker.
pub(crate) fn name(endpoint: usize) -> String {
    format!("llm-{endpoint}")
}

/// Reads the number in an endpoint's name.
pub(crate) fn number(name: &str) -> Option<u32> {
    name.strip_prefix("llm-")?.parse().ok()
}

/// Replaces the endpoints file, whole.
fn write_endpoints(folder: &Path, members: &[Member], engines: &[Running]) -> Result<()> {
    let line = |member: &Member| {
        let (name, port) = (name(member.endpoint), engines[member.process].port);
        format!("- {{ name: {name}, address: 127.0.0.1, port: {port}, engine: llama.cpp }}\n")
    };
    let lines: String = members.iter().map(line).collect();
    let text = format!("endpoints:\n{lines}");
    crate::progress::write_whole(&folder.join("endpoints.yaml"), text.as_bytes())
}
