//! The `llm-ring` command: arguments in, exit code out.

use std::process::ExitCode;

use clap::Parser as _;

fn main() -> ExitCode {
    llm_ring::cli::run(llm_ring::cli::Cli::parse())
}
