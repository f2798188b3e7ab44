//! The `llm-ring` command: arguments in, exit code out.

use std::process::ExitCode;

fn main() -> ExitCode {
    llm_ring::cli::run(std::env::args_os())
}
