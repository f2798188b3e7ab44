//! Makes a number of decisions and nothing else, for `instructions.sh` to count.
//!
//! usage: `instructions CASE ENDPOINTS PICKS`
#![allow(clippy::unwrap_used, reason = "a fault may end it")]

use setup::{Bench, Case};

mod setup;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [case, endpoints, picks] = arguments.as_slice() else {
        panic!("usage: instructions CASE ENDPOINTS PICKS");
    };
    let case = match case.as_str() {
        "new" => Case::New,
        "remembered" => Case::Remembered,
        "home-full" => Case::HomeFull,
        "all-full" => Case::AllFull,
        _ => panic!("new, remembered, home-full or all-full, not {case}"),
    };
    let mut bench = Bench::new("llm-aware", endpoints.parse().unwrap(), case);
    for _ in 0..picks.parse::<u32>().unwrap() {
        std::hint::black_box(bench.pick());
    }
}
