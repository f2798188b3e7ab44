//! `llm-ring-lab`: policies beside each other, on the same traffic and simulated engines.

fn main() {}
