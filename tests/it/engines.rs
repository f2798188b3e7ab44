//! Real llama.cpp engines behind Envoy: their caches are what all of this is for.

use std::net::{SocketAddr, TcpListener};
use std::process::Command;

use serde_json::{Value, json};
use tokio::sync::{MutexGuard, OnceCell};

use crate::harness::client::{Answer, get, post};
use crate::harness::envoy::{ORIGINAL_DST, OVERRIDE_HOST};
use crate::harness::picker::{BINARY, endpoints};
use crate::harness::process::{Process, folder, output};
use crate::harness::tools::Tools;
use crate::harness::upstream::Gate;
use crate::harness::{Stack, eventually, run};

const NAMES: [&str; 2] = ["llama-0", "llama-1"];

struct Engines {
    stack: Stack,
    processes: Vec<Process>,
}

/// The engines, for one test at a time: what another sends would make chats move.
async fn engines() -> Option<(&'static Stack, MutexGuard<'static, ()>)> {
    static ENGINES: OnceCell<Option<Engines>> = OnceCell::const_new();
    let Engines { stack, processes } = ENGINES.get_or_init(start).await.as_ref()?;
    processes.iter().for_each(Process::watch);
    Some((stack.watch(), stack.alone.lock().await))
}

async fn start() -> Option<Engines> {
    let tools = Tools::get()?;
    let mut processes = Vec::new();
    let mut addresses = Vec::new();
    for name in NAMES {
        let (process, address) = engine(tools, name).await;
        processes.push(process);
        addresses.push(address);
    }
    let fronts = [ORIGINAL_DST, OVERRIDE_HOST];
    let none = (Vec::new(), Gate::closed());
    let list = endpoints(NAMES.into_iter().zip(addresses.iter().copied()));
    let stack = Stack::before(tools, "", &list, none, &addresses, &fronts).await;
    Some(Engines { stack, processes })
}

/// Starts an engine. It wants to be told its port, and whoever else is given that port in the meantime makes it end:
/// then it is started again with another.
async fn engine(tools: &Tools, name: &str) -> (Process, SocketAddr) {
    for _ in 0..5 {
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let process = Process::start(name, &mut tools.engine(free.port(), 2, 4096));
        let ready = eventually("the engine to be ready", async || {
            if process.ended().is_some() {
                return Some(false);
            }
            drop(tokio::net::TcpStream::connect(free).await.ok()?);
            (get("/health").answer(free.port()).await.status == 200).then_some(true)
        });
        if ready.await {
            return (process, free);
        }
    }
    panic!("{name} ended early five times");
}

/// A chat that remembers what was said.
struct Chat {
    id: &'static str,
    messages: Vec<Value>,
    stream: bool,
}

/// What an engine counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Usage {
    prompt: u64,
    completion: u64,
    cached: u64,
}

impl Chat {
    fn new(id: &'static str, stream: bool) -> Self {
        let system =
            "You keep the archive of a small town. Say what the records tell, and no more.";
        Self { id, messages: vec![json!({ "role": "system", "content": system })], stream }
    }

    /// Asks; returns the record of the decision and the usage as the client was told it.
    async fn ask(&mut self, stack: &Stack, port: u16, question: &str) -> (Value, Usage) {
        self.messages.push(json!({ "role": "user", "content": question }));
        let body = json!({
            "model": "tiny", "messages": self.messages, "max_tokens": 12, "temperature": 0,
            "stream": self.stream, "stream_options": { "include_usage": true },
        });
        let call = post("/v1/chat/completions", body.to_string())
            .header("content-type", "application/json")
            .conversation(self.id);
        let answer = call.answer(port).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let (said, usage) = if self.stream { from_events(&answer) } else { from_json(&answer) };
        self.messages.push(json!({ "role": "assistant", "content": said }));
        (stack.picker.record(&call.id).await, usage)
    }
}

fn usage(of: &Value) -> Usage {
    let (usage, timings) = (&of["usage"], &of["timings"]);
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    Usage {
        prompt: usage["prompt_tokens"].as_u64().unwrap(),
        completion: usage["completion_tokens"].as_u64().unwrap(),
        cached: cached.as_u64().or(timings["cache_n"].as_u64()).unwrap(),
    }
}

fn from_json(answer: &Answer) -> (String, Usage) {
    let answer = answer.json();
    let said = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    (said, usage(&answer))
}

fn from_events(answer: &Answer) -> (String, Usage) {
    let events: Vec<Value> = answer
        .text()
        .lines()
        .filter_map(|line| line.strip_prefix("data: "))
        .filter_map(|data| serde_json::from_str(data).ok())
        .collect();
    assert!(answer.text().ends_with("data: [DONE]\n\n"));
    let said = events.iter().filter_map(|it| it["choices"][0]["delta"]["content"].as_str());
    let last = events.iter().rfind(|event| event["usage"].is_object()).expect("usage");
    (said.collect(), usage(last))
}

const QUESTIONS: [&str; 3] = [
    "Who built the old bridge over the mill river, and in which year was it paid for?",
    "And who kept it after the flood, when the council had no money for the toll house?",
    "What became of her brother, whose name is in the letter from the harbour?",
];

/// Plays a chat of three turns; the engine must find in its cache what it had been asked before.
fn check(id: &'static str, front: usize, stream: bool) {
    run(async {
        let Some((stack, _alone)) = engines().await else { return };
        let port = stack.envoys[front].port;
        let mut chat = Chat::new(id, stream);
        let (first, mut before) = chat.ask(stack, port, QUESTIONS[0]).await;
        for question in &QUESTIONS[1..] {
            let (record, usage) = chat.ask(stack, port, question).await;
            assert_eq!(record["target"], first["target"], "it moved: {record}");
            assert!(usage.cached * 10 > before.prompt * 9, "{usage:?} after {before:?}");
            let outcome = &record["outcome"];
            let noted = |name: &str| outcome[name].as_u64().unwrap();
            assert_eq!(
                usage,
                Usage {
                    prompt: noted("prompt_tokens"),
                    completion: noted("completion_tokens"),
                    cached: noted("cached_tokens"),
                }
            );
            // What the picker believed to be cached is what was.
            let believed = record["cached_tokens"].as_u64().unwrap();
            assert!(believed * 10 > before.prompt * 9, "believed {believed} after {before:?}");
            before = usage;
        }
    });
}

#[test]
fn a_chat_finds_its_cache_again() {
    check("json-original-dst", 0, false);
    check("json-override-host", 1, false);
}

#[test]
fn a_streamed_chat_finds_its_cache_again() {
    check("sse-original-dst", 0, true);
    check("sse-override-host", 1, true);
}

#[test]
fn the_estimate_of_tokens_moves_to_what_the_engine_counts() {
    run(async {
        let Some((stack, _alone)) = engines().await else { return };
        let mut off = Vec::new();
        for turn in 0..12 {
            // Of about equal length, and of no common conversation.
            let mut chat = Chat::new("estimate", false);
            let question = format!("{turn}: {}", QUESTIONS.join(" "));
            let (record, usage) = chat.ask(stack, stack.port(), &question).await;
            let estimated = record["prompt_tokens"].as_u64().unwrap();
            off.push((
                estimated.abs_diff(usage.prompt),
                usage.prompt,
                record["estimate_answers"].clone(),
            ));
        }
        let (first, last) = (&off[0], off.last().unwrap());
        assert!(last.0 * 10 < last.1, "still more than a tenth off: {off:?}");
        assert!(last.0 <= first.0, "it moved away: {off:?}");
        assert!(last.2.as_u64() >= Some(10), "{off:?}");
    });
}

/// Plays a chat whose tokens the picker is to know before the engine does; the two must agree on each turn.
async fn counts_agree(config: &str) {
    let Some(tools) = Tools::get() else { return };
    let (engine, address) = engine(tools, NAMES[0]).await;
    engine.watch();
    let list = endpoints([(NAMES[0], address)]);
    let none = (Vec::new(), Gate::closed());
    let stack = Stack::before(tools, config, &list, none, &[address], &[ORIGINAL_DST]).await;
    stack.watch();
    let mut chat = Chat::new("counted", false);
    let others = ["Répondez 简短 🙂, and say <|im_end|> as it is.", "", "  x\n\n\ty "];
    for question in QUESTIONS.iter().chain(&others) {
        let (record, usage) = chat.ask(&stack, stack.port(), question).await;
        assert_eq!(record["prompt_tokens"], usage.prompt, "{question:?}: {record}");
        assert_eq!(record["tokens_per_byte"].as_f64().unwrap_or(0.0), 0.0, "it was estimated");
    }
    stack.picker.reaches("llm_ring_token_failures_total", "", 0.0).await;
}

#[test]
fn the_picker_counts_as_the_engine_does() {
    run(async {
        let Some(tools) = Tools::get() else { return };
        // A model of somebody's own has its tokenizer somewhere else.
        let Some(folder) = &tools.tokenizer else { return };
        let model = format!("{{ folder: {folder}, dialect: llama-cpp }}");
        counts_agree(&format!("tokenizers: {{ models: {{ \"*\": {model} }} }}\n")).await;
    });
}

#[test]
fn an_engine_tells_what_it_will_count() {
    run(counts_agree("tokenizers: { engine: llama-cpp }\n"));
}

#[test]
fn a_logged_decision_can_be_made_again() {
    run(async {
        let Some((stack, _alone)) = engines().await else { return };
        let mut chat = Chat::new("explained", false);
        chat.ask(stack, stack.port(), QUESTIONS[0]).await;
        let (record, _) = chat.ask(stack, stack.port(), QUESTIONS[1]).await;
        let id = record["request_id"].as_str().unwrap();
        let line = |line: &str| {
            (line.contains(id) && line.contains("\"decision\"")).then(|| line.to_owned())
        };
        let line = stack.picker.process.line("the line", line).await;
        let file = folder("explain").join("decision.json");
        std::fs::write(&file, line).unwrap();

        let explain = || {
            let mut command = Command::new(BINARY);
            command.arg("explain").arg(&file);
            command
        };
        let (code, json, errors) = output(explain().args(["--output", "json"]));
        assert_eq!(code, Some(0), "{errors}");
        let again: Value = serde_json::from_str(&json).unwrap();
        let again = &again["decisions"][0];
        for key in ["target", "reason", "policy", "conversation", "destinations", "steps", "loads"]
        {
            assert_eq!(again[key], record[key], "{key}");
        }
        let (code, text, errors) = output(&mut explain());
        assert_eq!(code, Some(0), "{errors}");
        let target = record["target"].as_str().unwrap();
        assert!(text.contains(&format!("llm-aware → {target}")), "{text}");
    });
}

#[test]
fn a_watcher_sees_decisions_and_their_ends() {
    run(async {
        let Some((stack, _alone)) = engines().await else { return };
        let mut command = Command::new(BINARY);
        let address = format!("http://127.0.0.1:{}", stack.picker.health);
        command.args(["watch", "--address", &address, "--output", "json"]);
        let watch = Process::start("watch", command.args(["--conversation", "watched"]));
        // Whether it is connected, only a decision that it shows can tell.
        let seen = eventually("a decision", async || {
            Chat::new("watched", false).ask(stack, stack.port(), QUESTIONS[0]).await;
            Chat::new("unwatched", false).ask(stack, stack.port(), QUESTIONS[0]).await;
            watch.find(|line| line.starts_with('{').then(|| line.to_owned()))
        })
        .await;
        let seen: Value = serde_json::from_str(&seen).unwrap();
        assert_eq!(seen["conversation"]["id"], "watched");
        let record = stack.picker.record(seen["request_id"].as_str().unwrap()).await;
        assert_eq!(seen["target"], record["target"]);
        let ended = |line: &str| -> Option<Value> {
            let line: Value = serde_json::from_str(line).ok()?;
            assert_eq!(line["conversation"]["id"], "watched");
            line["outcome"].is_object().then_some(line)
        };
        let ended = watch.line("its end", ended).await;
        assert_eq!(ended["outcome"]["ending"], "complete");
    });
}
