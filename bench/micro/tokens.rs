//! How fast prompts become tokens: `cargo run --release --example tokens -- FOLDER TEXT`, a model folder with a plain chat template and a megabyte of text.
#![allow(
    clippy::print_stdout,
    clippy::disallowed_methods,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "it measures and prints"
)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use jiff::Timestamp;
use llm_ring::tokens::{Api, Dialect, LocalTokenizers, ModelOptions};
use serde_json::json;

const RUNS: usize = 15;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = std::env::args().nth(1).ok_or("tokens FOLDER TEXT")?;
    let text = std::fs::read_to_string(std::env::args().nth(2).ok_or("tokens FOLDER TEXT")?)?;
    let load = || {
        let options = ModelOptions {
            folder: PathBuf::from(&folder),
            dialect: Dialect::Vllm,
            chat_template: None,
            content_format: None,
        };
        LocalTokenizers::load(&BTreeMap::from([("m".to_owned(), options)]), 64 << 20, 16 << 20)
    };
    let began = Instant::now();
    let tokenizers = load().map_err(|(_, error)| error)?;
    println!("load {:?}", began.elapsed());
    let ask = |tokenizers: &LocalTokenizers, messages: &serde_json::Value| {
        let body = json!({"model": "m", "messages": messages}).to_string();
        let began = Instant::now();
        let ids = tokenizers.tokens("m", Api::Chat, body.as_bytes(), Timestamp::UNIX_EPOCH);
        (began.elapsed(), ids.map(|ids| ids.len()))
    };
    let bytes_a_token = {
        let (_, ids) = ask(&tokenizers, &json!([{"role": "user", "content": &text[..200_000]}]));
        200_000.0 / ids? as f64
    };
    println!("{bytes_a_token:.2} bytes a token");
    let take = |from: usize, tokens: usize| {
        let wanted = (tokens as f64 * bytes_a_token) as usize;
        text.get(from..from + wanted).unwrap_or_default()
    };

    let mut times = Vec::new();
    let mut count = 0;
    for run in 0..RUNS {
        let fresh = take(run * 1000, 100_000);
        let (time, ids) = ask(&tokenizers, &json!([{"role": "user", "content": fresh}]));
        (count, _) = (ids?, times.push(time));
    }
    let (whole, best) = (median(&mut times), times[0]);
    println!(
        "{count} tokens, all new: median {whole:?}, {:.0} tokens/s; best {best:?}",
        count as f64 / whole.as_secs_f64()
    );
    let (time, _) =
        ask(&tokenizers, &json!([{"role": "user", "content": take((RUNS - 1) * 1000, 100_000)}]));
    println!("the same again: {time:?}");

    for total in [20_000, 100_000] {
        let mut talk: Vec<_> = (0..total / 500)
            .map(|turn| {
                let role = if turn % 2 == 0 { "user" } else { "assistant" };
                json!({"role": role, "content": take(700_000 + turn * 100, 500)})
            })
            .collect();
        let (_, _warmed) = ask(&tokenizers, &json!(talk));
        let mut times = Vec::new();
        for run in 0..RUNS {
            talk.push(json!({"role": "user", "content": take(run * 2000, 200)}));
            let (time, ids) = ask(&tokenizers, &json!(talk));
            (count, _) = (ids?, times.push(time));
        }
        println!(
            "a new turn of 200 tokens on about {count}: median {:?}, best {:?}",
            median(&mut times),
            times[0]
        );
        let mut times = Vec::new();
        for _ in 0..3 {
            let (time, _) = ask(&load().map_err(|(_, error)| error)?, &json!(talk));
            times.push(time);
        }
        println!("the same with an empty memo: {:?}", median(&mut times));
    }
    println!("memo {:?}", tokenizers.memo_use());
    Ok(())
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}
