//! Child processes that end with this one, whatever ends it, each with a log file.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context as _, Result, bail};

/// Lines of a log that an error shows.
const TAIL: usize = 12;

/// A running child; dropping it kills it.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a command that writes its log into a folder.
    pub(crate) fn start(name: &str, command: &mut Command, folder: &Path) -> Result<Self> {
        let log = folder.join(format!("{name}.log"));
        let mut start = || -> Result<Child> {
            let output = File::create(&log)?;
            let command = command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
            // Of a group of its own, so that Ctrl-C is ours alone.
            Ok(command.process_group(0).spawn()?)
        };
        let child = start().with_context(|| format!("{name} cannot be started"))?;
        tell_reaper('+', child.id())?;
        Ok(Self { name: name.to_owned(), child, log })
    }

    /// Tells whether it has ended.
    pub(crate) fn ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// # Errors
    /// It has ended, which nobody asked it to.
    pub(crate) fn check(&mut self) -> Result<()> {
        match self.child.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}){}", self.name, self.tail()),
        }
    }

    /// Returns what it has written.
    pub(crate) fn log(&self) -> String {
        fs::read(&self.log)
            .map(|log| String::from_utf8_lossy(&log).into_owned())
            .unwrap_or_default()
    }

    /// Returns the end of its log, for an error.
    pub(crate) fn tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = &lines[lines.len().saturating_sub(TAIL)..];
        format!("; the end of {}:\n  {}", self.log.display(), tail.join("\n  "))
    }

    /// Ends it as a crash does.
    pub(crate) fn kill(&mut self) {
        // It may have ended by itself.
        self.child.kill().ok();
        self.child.wait().ok();
        tell_reaper('-', self.child.id()).ok();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Tells the reaper of a process that began or ended: it kills what is left when we are gone, be it by SIGKILL.
fn tell_reaper(sign: char, pid: u32) -> Result<()> {
    static REAPER: OnceLock<Mutex<Option<ChildStdin>>> = OnceLock::new();
    let reaper = REAPER.get_or_init(|| Mutex::new(reaper().ok()));
    let mut input = reaper.lock().unwrap_or_else(PoisonError::into_inner);
    let input = input.as_mut().context("`sh` cannot be run")?;
    writeln!(input, "{sign} {pid}").context("the process that cleans up is gone")
}

fn reaper() -> Result<ChildStdin> {
    const SCRIPT: &str = r#"
        running=" "
        while read -r sign pid; do
            case $sign in
                +) running="$running$pid " ;;
                -) running="${running%% $pid *} ${running#* $pid }" ;;
            esac
        done
        for pid in $running; do kill -s KILL "$pid" 2>/dev/null; done
    "#;
    let mut sh = Command::new("sh");
    sh.args(["-c", SCRIPT]).process_group(0);
    let mut child = sh.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
    child.stdin.take().context("it has an input")
}
