//! Runs a list of jobs on all cores, and keeps each as soon as it is finished: what was made once is not made again.

use std::io::Write as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context as _, Error, Result};

use crate::progress::{Bar, Key, Store};
use crate::record::Run;

/// One run to be made.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    pub(crate) key: Key,
    /// About how long it takes, in any unit. It orders the jobs and moves the bar.
    pub(crate) cost: f64,
}

/// What came of the jobs.
#[derive(Debug)]
pub(crate) struct Grid<T> {
    /// In the order of the jobs; `None` was not reached.
    pub(crate) results: Vec<Option<T>>,
    /// How many were in the store already.
    pub(crate) found: usize,
}

impl<T> Grid<T> {
    /// How many jobs are left to do.
    pub(crate) fn missing(&self) -> usize {
        self.results.iter().filter(|result| result.is_none()).count()
    }
}

pub(crate) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// A flag that is up once Ctrl-C was pressed; the second time ends the program.
pub(crate) fn stop_on_ctrl_c() -> Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    let pressed = Arc::clone(&stop);
    let watch = async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            pressed.store(true, Ordering::Relaxed);
            // Not to be able to say so is no reason not to stop.
            writeln!(
                std::io::stderr(),
                "\nThe runs in flight are finished; again to leave at once."
            )
            .ok();
            if tokio::signal::ctrl_c().await.is_ok() {
                std::process::exit(130);
            }
        }
    };
    thread::Builder::new().name("ctrl-c".to_owned()).spawn(move || runtime.block_on(watch))?;
    Ok(stop)
}

/// Makes the runs that the store does not have, and keeps of each what `keep` takes from it. When `stop` is up, or a
/// job failed, those in flight are finished and no other is begun.
pub(crate) fn run<T: Send>(
    jobs: &[Job],
    store: &Store,
    workers: usize,
    stop: &AtomicBool,
    make: impl Fn(&Job) -> Result<Run> + Sync,
    keep: impl Fn(&Run) -> T + Sync,
) -> Result<Grid<T>> {
    run_telling(jobs, store, workers, stop, |job, _| make(job), keep)
}

/// The same for jobs that take minutes: `make` tells how much more of a job's cost is behind it.
pub(crate) fn run_telling<T: Send>(
    jobs: &[Job],
    store: &Store,
    workers: usize,
    stop: &AtomicBool,
    make: impl Fn(&Job, &dyn Fn(f64)) -> Result<Run> + Sync,
    keep: impl Fn(&Run) -> T + Sync,
) -> Result<Grid<T>> {
    let find = |at: usize| Ok(store.get(&jobs[at].key)?.as_ref().map(&keep));
    let mut results: Vec<Option<T>> = jobs.iter().map(|_| None).collect();
    for (at, found) in spread(&(0..jobs.len()).collect::<Vec<_>>(), workers, stop, find)? {
        results[at] = found;
    }
    let missing: Vec<usize> =
        longest_first(jobs).into_iter().filter(|at| results[*at].is_none()).collect();
    let found = jobs.len() - missing.len();

    let bar = Bar::new(missing.len(), missing.iter().map(|at| jobs[*at].cost).sum())?;
    let done = AtomicUsize::new(0);
    let work = |at: usize| -> Result<T> {
        let job = &jobs[at];
        bar.starts(done.load(Ordering::Relaxed), &job.key);
        let told = Mutex::new(0.0);
        let tell = |cost: f64| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) += cost;
            bar.ends(cost);
        };
        store.put(&job.key, &make(job, &tell)?)?;
        done.fetch_add(1, Ordering::Relaxed);
        bar.ends(job.cost - told.into_inner().unwrap_or_else(PoisonError::into_inner));
        // Read back, so that a report is the same whether its runs were made now or found.
        let run = store.get(&job.key)?.context("it was not found where it was just put")?;
        Ok(keep(&run))
    };
    let work = |at: usize| work(at).with_context(|| name(&jobs[at].key));
    for (at, made) in spread(&missing, workers, stop, work)? {
        results[at] = Some(made);
    }
    Ok(Grid { results, found })
}

fn name(key: &Key) -> String {
    format!("{} under {}, seed {}", key.workload, key.policy, key.seed)
}

/// The long ones first, so that no core works alone at the end.
fn longest_first(jobs: &[Job]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by(|a, b| jobs[*b].cost.total_cmp(&jobs[*a].cost));
    order
}

/// Works on all numbers of `order`, in about that order; the first error ends it when those in flight are finished.
fn spread<T: Send>(
    order: &[usize],
    workers: usize,
    stop: &AtomicBool,
    work: impl Fn(usize) -> Result<T> + Sync,
) -> Result<Vec<(usize, T)>> {
    let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let done: Mutex<Vec<(usize, T)>> = Mutex::default();
    let first: Mutex<Option<Error>> = Mutex::default();
    let lock_first = || first.lock().unwrap_or_else(PoisonError::into_inner);
    let worker = || {
        while !stop.load(Ordering::Relaxed) && !failed.load(Ordering::Relaxed) {
            let Some(at) = order.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
            match work(*at) {
                Ok(result) => {
                    done.lock().unwrap_or_else(PoisonError::into_inner).push((*at, result));
                }
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    lock_first().get_or_insert(error);
                }
            }
        }
    };
    thread::scope(|scope| {
        for _ in 0..workers.clamp(1, order.len().max(1)) {
            scope.spawn(worker);
        }
    });
    if let Some(error) = lock_first().take() {
        return Err(error);
    }
    Ok(done.into_inner().unwrap_or_else(PoisonError::into_inner))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use anyhow::bail;
    use serde_json::json;

    use super::*;
    use crate::metrics::{Measured, made_up};
    use crate::progress::folder::Folder;

    fn jobs(count: u64) -> Vec<Job> {
        let key = |seed| Key {
            workload: "chat".to_owned(),
            policy: "bounded".to_owned(),
            seed,
            parameters: json!({"epsilon": 0.25}),
        };
        (0..count).map(|seed| Job { key: key(seed), cost: (seed % 5) as f64 }).collect()
    }

    #[expect(clippy::unnecessary_wraps, reason = "it stands for a simulation, which can fail")]
    fn make(job: &Job) -> Result<Run> {
        Ok(made_up::run(&job.key.workload, &job.key.policy, job.key.seed, 0.5))
    }

    fn store(folder: &Folder) -> Store {
        Store::open(folder.path(), "1", "lab").unwrap()
    }

    #[test]
    fn every_job_is_made_once_and_results_are_in_the_order_of_jobs() {
        let folder = Folder::new("grid");
        let (jobs, store, stop) = (jobs(20), store(&folder), AtomicBool::new(false));
        let made = Mutex::new(Vec::new());
        let make = |job: &Job| {
            made.lock().unwrap().push(job.key.seed);
            make(job)
        };
        let grid = run(&jobs, &store, 4, &stop, make, |run| run.seed).unwrap();
        assert_eq!(grid.results, (0..20).map(Some).collect::<Vec<_>>());
        assert_eq!((grid.found, grid.missing()), (0, 0));
        let made = made.into_inner().unwrap();
        assert_eq!(made.iter().collect::<BTreeSet<_>>().len(), 20);
        assert_eq!(made[0] % 5, 4, "a long one is first");

        let grid = run(&jobs, &store, 4, &stop, |_| bail!("not again"), |run| run.seed).unwrap();
        assert_eq!((grid.found, grid.missing()), (20, 0));
    }

    #[test]
    fn a_stop_keeps_what_is_done_and_the_next_start_goes_on_to_the_same_end() {
        let (whole, stopped) = (Folder::new("whole"), Folder::new("stopped"));
        let (jobs, never, stop) = (jobs(12), AtomicBool::new(false), AtomicBool::new(false));
        let expected = run(&jobs, &store(&whole), 3, &never, make, Measured::of).unwrap();
        let count = AtomicUsize::new(0);
        let stopping = |job: &Job| {
            if count.fetch_add(1, Ordering::Relaxed) == 4 {
                stop.store(true, Ordering::Relaxed);
            }
            make(job)
        };
        let grid = run(&jobs, &store(&stopped), 3, &stop, stopping, Measured::of).unwrap();
        assert!((1..=7).contains(&grid.missing()), "{}", grid.missing());
        let rest = run(&jobs, &store(&stopped), 3, &never, make, Measured::of).unwrap();
        assert_eq!(rest.found, 12 - grid.missing());
        assert_eq!(rest.results, expected.results);
    }

    #[test]
    fn a_failure_names_its_job() {
        let folder = Folder::new("failure");
        let failing = |job: &Job| if job.key.seed == 7 { bail!("no memory") } else { make(job) };
        let store = store(&folder);
        let error = run(&jobs(9), &store, 2, &AtomicBool::new(false), failing, |_| ()).unwrap_err();
        assert_eq!(format!("{error:#}"), "chat under bounded, seed 7: no memory");
    }

    #[test]
    fn no_jobs_are_no_trouble() {
        let folder = Folder::new("none");
        let grid = run(&[], &store(&folder), 4, &AtomicBool::new(false), make, |_| ()).unwrap();
        assert_eq!(grid.missing(), 0);
    }
}
