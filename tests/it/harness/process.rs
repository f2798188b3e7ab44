//! Child processes that end with the test run, whatever ends it, and whose logs are at hand when a test fails.

use std::cell::RefCell;
use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, Mutex, Once};

use super::eventually;

/// Lines of a log that a failed test shows.
const TAIL: usize = 8;
/// Characters of each that it shows.
const WIDTH: usize = 600;

/// What a process has written, standard output and standard error together.
#[derive(Debug)]
pub(crate) struct Log {
    name: String,
    lines: Mutex<Vec<String>>,
}

/// A running child; dropping it kills it.
pub(crate) struct Process {
    child: Mutex<Child>,
    pid: u32,
    log: Arc<Log>,
}

thread_local! {
    /// The logs of what this thread's test uses.
    static WATCHED: RefCell<Vec<Arc<Log>>> = const { RefCell::new(Vec::new()) };
}

impl Log {
    fn tail(&self) -> String {
        let lines = self.lines.lock().unwrap();
        let tail = lines[lines.len().saturating_sub(TAIL)..].iter();
        let tail: Vec<String> = tail.map(|line| line.chars().take(WIDTH).collect()).collect();
        format!("--- the log of {}, its end:\n{}\n", self.name, tail.join("\n"))
    }

    fn follow(self: Arc<Self>, output: impl Read + Send + 'static) {
        std::thread::spawn(move || {
            for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
                self.lines.lock().unwrap().push(String::from_utf8_lossy(&line).into_owned());
            }
        });
    }
}

impl Process {
    pub(crate) fn start(name: &str, command: &mut Command) -> Self {
        show_logs_of_failed_tests();
        let mut child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("{name} cannot be started: {error}"));
        let pid = child.id();
        REAPER.tell('+', pid);
        let log = Arc::new(Log { name: name.to_owned(), lines: Mutex::default() });
        Arc::clone(&log).follow(child.stdout.take().unwrap());
        Arc::clone(&log).follow(child.stderr.take().unwrap());
        let process = Self { child: Mutex::new(child), pid, log };
        process.watch();
        process
    }

    /// Shows the end of this process's log if the test of this thread fails.
    pub(crate) fn watch(&self) {
        WATCHED.with_borrow_mut(|logs| {
            if !logs.iter().any(|log| Arc::ptr_eq(log, &self.log)) {
                logs.push(Arc::clone(&self.log));
            }
        });
    }

    /// Finds the first line of its log of which `read` makes something.
    pub(crate) fn find<T>(&self, read: impl FnMut(&str) -> Option<T>) -> Option<T> {
        self.log.lines.lock().unwrap().iter().map(String::as_str).find_map(read)
    }

    pub(crate) fn text(&self) -> String {
        self.log.lines.lock().unwrap().join("\n")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn signal(&self, signal: &str) {
        signal_group(signal, self.pid);
    }

    pub(crate) fn ended(&self) -> Option<ExitStatus> {
        self.child.lock().unwrap().try_wait().unwrap()
    }

    /// Waits for its end.
    pub(crate) async fn end(&self) -> ExitStatus {
        eventually(&format!("the end of {}", self.log.name), async || self.ended()).await
    }

    /// Waits for a line of its log.
    pub(crate) async fn line<T>(&self, what: &str, mut read: impl FnMut(&str) -> Option<T>) -> T {
        let name = &self.log.name;
        eventually(&format!("{what} in the log of {name}"), async || {
            let found = self.find(&mut read);
            assert!(found.is_some() || self.ended().is_none(), "{name} ended early");
            found
        })
        .await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let child = self.child.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        if child.try_wait().is_ok_and(|status| status.is_none()) {
            signal_group("KILL", self.pid);
            drop(child.wait());
        }
        REAPER.tell('-', self.pid);
    }
}

/// Runs a command to its end, and returns its exit code, standard output and standard error.
pub(crate) fn output(command: &mut Command) -> (Option<i32>, String, String) {
    let output = command.stdin(Stdio::null()).output().unwrap();
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn signal_group(signal: &str, pid: u32) {
    let arguments = [format!("-{signal}"), "--".to_owned(), format!("-{pid}")];
    // It may have ended by itself.
    drop(Command::new("kill").args(arguments).stderr(Stdio::null()).status());
}

fn show_logs_of_failed_tests() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            before(panic);
            WATCHED.with_borrow(|logs| logs.iter().for_each(|log| eprint!("{}", log.tail())));
        }));
    });
}

/// Kills what is left and removes the run's folder when this process has gone, be it by SIGKILL: what several tests
/// share is never dropped.
struct Reaper {
    folder: PathBuf,
    input: Mutex<ChildStdin>,
}

#[expect(clippy::zombie_processes, reason = "it waits for us, not we for it")]
static REAPER: LazyLock<Reaper> = LazyLock::new(|| {
    const SCRIPT: &str = r#"
        running=" "
        while read -r sign pid; do
            case $sign in
                +) running="$running$pid " ;;
                -) running="${running%% $pid *} ${running#* $pid }" ;;
            esac
        done
        for pid in $running; do kill -s KILL -- "-$pid" 2>/dev/null; done
        rm -rf "$1"
    "#;
    let folder =
        PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("it-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let child = Command::new("sh")
        .args(["-c", SCRIPT, "reaper"])
        .arg(&folder)
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    Reaper { folder, input: Mutex::new(child.stdin.unwrap()) }
});

impl Reaper {
    fn tell(&self, sign: char, pid: u32) {
        drop(writeln!(self.input.lock().unwrap(), "{sign} {pid}"));
    }
}

/// Makes a folder that lasts as long as the test run.
pub(crate) fn folder(name: &str) -> PathBuf {
    static MADE: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let number = MADE.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let folder = REAPER.folder.join(format!("{number}-{name}"));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}
