//! The model of one engine, in the shape of vLLM: continuous batching, chunked prefill, a cache of blocks, preemption.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use anyhow::Context as _;
use serde::Deserialize;

use super::recency::Recency;
use super::workload::Request;

/// A block of a prompt's tokens, by a number that is dense within a workload.
pub(crate) type Block = u32;

/// However much is cached, this many tokens of a prompt are computed.
const ALWAYS_COMPUTED: i64 = 16;

/// What a step takes and what fits: see `engines.yaml`.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Params {
    pub(crate) overhead: f64,
    pub(crate) floor: f64,
    pub(crate) prefill: f64,
    pub(crate) decode: f64,
    pub(crate) attention: f64,
    pub(crate) context: f64,
    pub(crate) budget: i64,
    pub(crate) sequences: i64,
    pub(crate) tokens: i64,
    pub(crate) block: i64,
}

/// Which blocks each engine has computed, a bit an engine.
#[derive(Debug, Default)]
pub(crate) struct Blocks {
    computed: Vec<u64>,
    /// What changed since somebody last looked, if anybody does.
    events: Option<Vec<Event>>,
}

/// An engine stored or evicted a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) block: Block,
    pub(crate) engine: usize,
    pub(crate) stored: bool,
}

/// A request and how far it is.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) request: Request,
    pub(crate) endpoint: Option<usize>,
    pub(crate) dispatched: Option<f64>,
    pub(crate) ttft: Option<f64>,
    pub(crate) finished: Option<f64>,
    /// Tokens found in the cache, and the most that any engine had at dispatch.
    pub(crate) cached: i64,
    pub(crate) best_cached: i64,
    stage: Stage,
    /// Tokens still to be computed before the next token is generated, and those done.
    todo: i64,
    done: i64,
    generated: i64,
    /// Its blocks up to here are computed.
    computed: usize,
    /// The step at whose end it has its last token.
    last_step: i64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Waiting,
    Prefilling,
    Decoding,
    Preempted,
    Done,
}

/// What the end of a step shows to the outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Happening {
    /// A request's first token.
    First(usize),
    /// A request's last token.
    Finished(usize),
}

/// One engine.
#[derive(Debug)]
pub(crate) struct Engine {
    params: Params,
    number: usize,
    /// Steps take this much less time.
    speed: f64,
    /// Blocks of its cache.
    capacity: i64,
    /// How many running requests hold each block.
    references: Vec<u32>,
    referenced: i64,
    /// Blocks that nobody holds and that are still there.
    unused: Recency,
    waiting: VecDeque<usize>,
    waiting_blocks: i64,
    prefilling: Vec<usize>,
    /// Sequences that decode, tokens of their contexts, and those of them that were generated.
    decoding: i64,
    contexts: i64,
    generated: i64,
    steps: i64,
    ends: BinaryHeap<Reverse<(i64, u64, usize)>>,
    /// Decoding requests in the order in which they began; those that are done stay a while.
    admitted: Vec<usize>,
    sequence: u64,
    step_end: Option<f64>,
    /// What the step computes of which request; it holds the first of `prefilling`.
    plan: Vec<(usize, i64)>,
    /// How much of the plan the end of the step has been through.
    planned: usize,
    /// A request whose first token has been shown, and that has not gone on yet.
    begun: Option<usize>,
    pub(crate) prefill_tokens: i64,
    pub(crate) decode_tokens: i64,
    pub(crate) preemptions: u64,
}

impl Params {
    /// Finds a set by its name.
    pub(crate) fn named(name: &str) -> anyhow::Result<Self> {
        let mut sets: std::collections::BTreeMap<String, Self> =
            serde_yaml::from_str(include_str!("engines.yaml")).context("engines.yaml")?;
        sets.remove(name).with_context(|| {
            format!("there is no engine `{name}`, but {:?}", sets.keys().collect::<Vec<_>>())
        })
    }

    /// Returns the blocks of some tokens: at least one.
    pub(crate) fn blocks(&self, tokens: i64) -> usize {
        usize::try_from(tokens.max(1)).expect("tokens").div_ceil(self.block_size())
    }

    /// Returns the whole blocks of some tokens.
    pub(crate) fn whole_blocks(&self, tokens: i64) -> usize {
        usize::try_from(tokens).expect("tokens") / self.block_size()
    }

    /// Returns the seconds of a step that computes no prompt.
    pub(crate) fn decode_step(&self, decoding: f64, contexts: f64) -> f64 {
        self.overhead + self.floor.max(self.decode * decoding) + self.context * contexts
    }

    fn block_size(&self) -> usize {
        usize::try_from(self.block).expect("a block has tokens")
    }
}

impl Blocks {
    /// Starts without blocks; `watched` if somebody takes the events.
    pub(crate) fn new(watched: bool) -> Self {
        Self { computed: Vec::new(), events: watched.then(Vec::new) }
    }

    /// Makes room for blocks with numbers below `blocks`.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        if self.computed.len() < blocks {
            self.computed.resize(blocks, 0);
        }
    }

    /// Takes the events since the last time.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        self.events.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Notes what an event says.
    pub(crate) fn apply(&mut self, event: Event) {
        let bit = 1 << event.engine;
        let bits = &mut self.computed[event.block as usize];
        let before = *bits;
        *bits = if event.stored { before | bit } else { before & !bit };
        if *bits != before
            && let Some(events) = &mut self.events
        {
            events.push(event);
        }
    }

    /// Returns how many of the first `blocks` an engine has.
    pub(crate) fn prefix(&self, engine: usize, blocks: &[Block]) -> usize {
        prefix(blocks, |block| self.computed[block as usize] >> engine & 1 == 1)
    }

    /// Tells which engines have a block, a bit an engine.
    pub(crate) fn holders(&self, block: Block) -> u64 {
        self.computed[block as usize]
    }

    fn forget(&mut self, engine: usize) {
        for block in 0..u32::try_from(self.computed.len()).expect("blocks are u32") {
            self.apply(Event { block, engine, stored: false });
        }
    }
}

/// Divides, and rounds up.
fn parts(whole: i64, part: i64) -> i64 {
    (whole + part - 1) / part
}

/// Counts the first blocks that are there, by halving: where a later one is there, so are those before it.
pub(crate) fn prefix(blocks: &[Block], there: impl Fn(Block) -> bool) -> usize {
    let (Some(&first), Some(&last)) = (blocks.first(), blocks.last()) else { return 0 };
    if !there(first) {
        return 0;
    }
    if there(last) {
        return blocks.len();
    }
    let (mut low, mut high) = (0, blocks.len() - 1);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        if there(blocks[middle]) {
            low = middle;
        } else {
            high = middle;
        }
    }
    low + 1
}

impl Job {
    /// Takes a request that its client is to send.
    pub(crate) fn new(request: Request) -> Self {
        Self {
            request,
            endpoint: None,
            dispatched: None,
            ttft: None,
            finished: None,
            cached: 0,
            best_cached: 0,
            stage: Stage::Waiting,
            todo: 0,
            done: 0,
            generated: 0,
            computed: 0,
            last_step: 0,
        }
    }

    /// Returns its tokens that are in the context so far.
    fn length(&self) -> i64 {
        self.request.prompt + self.generated
    }
}

impl Engine {
    /// Starts an engine with an empty cache.
    pub(crate) fn new(params: Params, number: usize, speed: f64) -> Self {
        Self {
            number,
            speed,
            capacity: params.tokens / params.block,
            params,
            references: Vec::new(),
            referenced: 0,
            unused: Recency::default(),
            waiting: VecDeque::new(),
            waiting_blocks: 0,
            prefilling: Vec::new(),
            decoding: 0,
            contexts: 0,
            generated: 0,
            steps: 0,
            ends: BinaryHeap::new(),
            admitted: Vec::new(),
            sequence: 0,
            step_end: None,
            plan: Vec::new(),
            planned: 0,
            begun: None,
            prefill_tokens: 0,
            decode_tokens: 0,
            preemptions: 0,
        }
    }

    /// Makes room for blocks with numbers below `blocks`.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        if self.references.len() < blocks {
            self.references.resize(blocks, 0);
            self.unused.reserve(blocks);
        }
    }

    /// Returns how much faster it is than its parameters say.
    pub(crate) fn speed(&self) -> f64 {
        self.speed
    }

    /// Counts the requests that wait for admission.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Counts the requests that are admitted and not done.
    pub(crate) fn running(&self) -> usize {
        self.prefilling.len() + usize::try_from(self.decoding).unwrap_or(0)
    }

    /// Counts the blocks of the prompts of those that wait.
    pub(crate) fn waiting_blocks(&self) -> i64 {
        self.waiting_blocks
    }

    /// Counts the sequences that decode.
    pub(crate) fn decoding(&self) -> i64 {
        self.decoding
    }

    /// Counts the tokens of their contexts.
    pub(crate) fn contexts(&self) -> i64 {
        self.contexts
    }

    /// Tells whether a running request holds a block.
    pub(crate) fn holds(&self, block: Block) -> bool {
        self.references[block as usize] > 0
    }

    /// Counts the blocks that running requests hold.
    pub(crate) fn used(&self) -> i64 {
        // A sequence's last block is half full on average.
        let begun = if self.params.block <= 64 { self.decoding } else { self.decoding / 2 };
        self.referenced + self.generated / self.params.block + begun
    }

    /// Counts the blocks that hold nothing.
    pub(crate) fn free(&self) -> i64 {
        self.capacity - self.used() - self.unused.len()
    }

    /// Returns the share of the cache that running requests hold.
    pub(crate) fn use_of_cache(&self) -> f64 {
        (self.used() as f64 / self.capacity as f64).min(1.0)
    }

    /// Returns when the running step ends.
    pub(crate) fn step_end(&self) -> Option<f64> {
        self.step_end
    }

    /// Takes a request into its queue; an idle engine starts.
    pub(crate) fn enqueue(&mut self, job: usize, jobs: &mut [Job], blocks: &mut Blocks, now: f64) {
        jobs[job].stage = Stage::Waiting;
        self.waiting.push_back(job);
        self.waiting_blocks += jobs[job].request.blocks.len() as i64;
        if self.step_end.is_none() {
            self.start(jobs, blocks, now);
        }
    }

    /// Loses everything, as an engine that crashes does, and returns the requests that were on it.
    pub(crate) fn crash(&mut self, blocks: &mut Blocks) -> Vec<usize> {
        blocks.forget(self.number);
        let decoding = self.ends.drain().map(|Reverse((_, _, job))| job);
        let mut lost: Vec<usize> = decoding.collect();
        lost.append(&mut self.prefilling);
        lost.extend(self.waiting.drain(..));
        lost.sort_unstable();
        let fresh = Self::new(self.params, self.number, self.speed);
        let old = std::mem::replace(self, fresh);
        self.prefill_tokens = old.prefill_tokens;
        self.decode_tokens = old.decode_tokens;
        self.preemptions = old.preemptions;
        self.reserve(old.references.len());
        lost
    }

    /// Starts a step, if there is anything to do.
    pub(crate) fn start(&mut self, jobs: &mut [Job], blocks: &mut Blocks, now: f64) {
        self.step_end = None;
        let (prefill, attention) = self.plan(jobs, blocks);
        if prefill == 0 && self.decoding == 0 {
            return;
        }
        if self.decoding > 0 {
            self.generated += self.decoding;
            let over = self.used() + self.unused.len() - self.capacity;
            if over > 0 && !self.evict(over, blocks) {
                self.preempt(jobs, blocks);
            }
        }
        let p = &self.params;
        let computed = p.floor.max(p.prefill * prefill as f64 + p.decode * self.decoding as f64);
        let seconds =
            p.overhead + computed + p.attention * attention + p.context * self.contexts as f64;
        self.step_end = Some(now + seconds / self.speed);
        self.prefill_tokens += prefill;
        self.decode_tokens += self.decoding;
    }

    /// Divides the step's budget: first those that have begun, then those that wait.
    fn plan(&mut self, jobs: &mut [Job], blocks: &mut Blocks) -> (i64, f64) {
        let mut budget = self.params.budget - self.decoding;
        let (mut prefill, mut attention) = (0, 0.0);
        self.plan.clear();
        self.planned = 0;
        let mut at = 0;
        while budget > 0 {
            let job = if let Some(&job) = self.prefilling.get(at) {
                job
            } else {
                let running = self.decoding + self.prefilling.len() as i64;
                let Some(&job) = self.waiting.front() else { break };
                if running >= self.params.sequences || !self.admit(&mut jobs[job], blocks) {
                    break;
                }
                self.waiting.pop_front();
                self.waiting_blocks -= jobs[job].request.blocks.len() as i64;
                self.prefilling.push(job);
                job
            };
            let Job { todo, done, .. } = jobs[job];
            let chunk = todo.min(budget);
            self.plan.push((job, chunk));
            prefill += chunk;
            attention += chunk as f64 * (done as f64 + chunk as f64 * 0.5);
            budget -= chunk;
            at += 1;
        }
        (prefill, attention)
    }

    /// Gives a request the blocks of its prompt, or refuses.
    fn admit(&mut self, job: &mut Job, blocks: &mut Blocks) -> bool {
        let ids = &job.request.blocks;
        let hit = blocks.prefix(self.number, ids);
        let held = |block: &&Block| self.holds(**block);
        let pinned = (hit - ids[..hit].iter().filter(held).count()) as i64;
        let new = (ids.len() - hit - ids[hit..].iter().filter(held).count()) as i64;
        let new = new + parts(job.generated, self.params.block);
        // One more block for what it will generate; all that is unused can go, but for what it finds there itself.
        if new + 1 > self.capacity - self.used() - pinned {
            return false;
        }
        for &block in &ids[..hit] {
            if self.refer(block) {
                self.unused.remove(block);
            }
        }
        let free = self.free();
        if new > free {
            self.evict(new - free, blocks);
        }
        for &block in &job.request.blocks[hit..] {
            self.refer(block);
        }
        job.computed = hit;
        let cached = (hit as i64 * self.params.block).min(job.request.prompt);
        if job.stage == Stage::Waiting {
            job.cached = cached;
        }
        let length = job.length();
        job.todo = (length - cached).max(length.min(ALWAYS_COMPUTED));
        job.done = length - job.todo;
        job.stage = Stage::Prefilling;
        true
    }

    /// Holds a block once more, and tells whether nobody held it before.
    fn refer(&mut self, block: Block) -> bool {
        let references = &mut self.references[block as usize];
        *references += 1;
        if *references == 1 {
            self.referenced += 1;
        }
        *references == 1
    }

    fn evict(&mut self, count: i64, blocks: &mut Blocks) -> bool {
        let engine = self.number;
        self.unused.evict(count, |block| blocks.apply(Event { block, engine, stored: false }))
    }

    /// Takes memory back from those that were admitted last, until what is left fits.
    fn preempt(&mut self, jobs: &mut [Job], blocks: &mut Blocks) {
        while let Some(last) = self.admitted.pop() {
            let job = &mut jobs[last];
            if job.stage != Stage::Decoding {
                continue;
            }
            job.generated = job.request.output - (job.last_step - self.steps);
            self.decoding -= 1;
            self.contexts -= job.length();
            self.generated -= job.generated;
            job.stage = Stage::Preempted;
            job.todo = 0;
            self.release(job, blocks);
            self.ends.retain(|Reverse((_, _, job))| *job != last);
            self.waiting.push_front(last);
            self.waiting_blocks += jobs[last].request.blocks.len() as i64;
            self.preemptions += 1;
            if self.used() + self.unused.len() <= self.capacity {
                return;
            }
        }
    }

    /// Lets go of a request's blocks. Those of one that is done stay in the cache: the end of its prompt goes first.
    fn release(&mut self, job: &Job, blocks: &mut Blocks) {
        if job.stage == Stage::Done {
            if let Some(answer) = &job.request.answer {
                for &block in answer.iter().rev() {
                    if !self.holds(block) {
                        self.unused.touch(block);
                        blocks.apply(Event { block, engine: self.number, stored: true });
                    }
                }
            } else {
                self.unused.insert_run(job.generated / self.params.block);
            }
        }
        for &block in job.request.blocks.iter().rev() {
            let references = &mut self.references[block as usize];
            if *references == 0 {
                continue;
            }
            *references -= 1;
            if *references == 0 {
                self.referenced -= 1;
                if blocks.holders(block) >> self.number & 1 == 1 {
                    self.unused.insert(block);
                }
            }
        }
        let over = self.used() + self.unused.len() - self.capacity;
        if over > 0 {
            self.evict(over, blocks);
        }
    }

    /// Ends the running step. What it shows comes from [`Self::happening`], and [`Self::start`] goes on.
    pub(crate) fn end_step(&mut self) {
        self.steps += 1;
        self.contexts += self.decoding;
    }

    /// Returns the next thing that the end of the step shows.
    pub(crate) fn happening(
        &mut self,
        jobs: &mut [Job],
        blocks: &mut Blocks,
        now: f64,
    ) -> Option<Happening> {
        if let Some(begun) = self.begun.take() {
            jobs[begun].generated = 1;
            if self.go_on(begun, jobs, blocks, now) {
                return Some(Happening::Finished(begun));
            }
        }
        if let Some(&Reverse((last_step, _, done))) = self.ends.peek()
            && last_step <= self.steps
        {
            self.ends.pop();
            let job = &mut jobs[done];
            let output = job.request.output;
            self.decoding -= 1;
            self.contexts -= job.request.prompt + output;
            self.generated -= output;
            job.generated = output;
            self.finish(job, blocks, now);
            return Some(Happening::Finished(done));
        }
        while let Some(&(planned, chunk)) = self.plan.get(self.planned) {
            self.planned += 1;
            let job = &mut jobs[planned];
            self.compute(job, chunk, blocks);
            if job.todo > 0 {
                continue;
            }
            self.prefilling.retain(|&job| job != planned);
            if job.ttft.is_none() {
                job.ttft = Some(now - job.request.sent);
                self.begun = Some(planned);
                return Some(Happening::First(planned));
            }
            if self.go_on(planned, jobs, blocks, now) {
                return Some(Happening::Finished(planned));
            }
        }
        if self.admitted.len() as i64 > 4 * self.params.sequences {
            self.admitted.retain(|&job| jobs[job].stage == Stage::Decoding);
        }
        None
    }

    /// Notes a chunk of a prompt as computed.
    fn compute(&self, job: &mut Job, chunk: i64, blocks: &mut Blocks) {
        job.todo -= chunk;
        job.done += chunk;
        let all = job.request.blocks.len();
        let computed = if job.todo > 0 { self.params.whole_blocks(job.done).min(all) } else { all };
        for at in job.computed..computed {
            blocks.apply(Event {
                block: job.request.blocks[at],
                engine: self.number,
                stored: true,
            });
        }
        job.computed = computed;
    }

    /// Lets a request whose prompt is computed decode; true if its first token was its last.
    fn go_on(&mut self, begun: usize, jobs: &mut [Job], blocks: &mut Blocks, now: f64) -> bool {
        let job = &mut jobs[begun];
        let output = job.request.output;
        if job.generated >= output {
            self.finish(job, blocks, now);
            return true;
        }
        job.stage = Stage::Decoding;
        self.decoding += 1;
        self.contexts += job.length();
        self.generated += job.generated;
        job.last_step = self.steps + (output - job.generated);
        self.sequence += 1;
        self.ends.push(Reverse((job.last_step, self.sequence, begun)));
        self.admitted.push(begun);
        false
    }

    fn finish(&mut self, job: &mut Job, blocks: &mut Blocks, now: f64) {
        job.stage = Stage::Done;
        job.finished = Some(now);
        self.release(job, blocks);
    }

    /// Returns the seconds that `new` tokens after `cached` ones would take beside what decodes now.
    pub(crate) fn prefill_seconds(&self, new: i64, cached: f64) -> f64 {
        let p = &self.params;
        let budget = (p.budget - self.decoding).max(1);
        let (u, decoding) = (new as f64, self.decoding as f64);
        let steps = parts(new, budget).max(1) as f64;
        let overheads = steps * (p.overhead + p.context * self.contexts as f64);
        let mut computed = u * p.prefill + steps * p.decode * decoding;
        if new < budget {
            computed = p.floor.max(computed);
        }
        (overheads + computed + p.attention * (u * (cached + u * 0.5))) / self.speed
    }

    /// Returns the seconds of work before a request that came now would be begun.
    pub(crate) fn queue_seconds(
        &self,
        jobs: &[Job],
        blocks: &Blocks,
        marks: &mut Marks,
        now: f64,
    ) -> f64 {
        let p = &self.params;
        let running = self.step_end.map_or(0.0, |end| (end - now).max(0.0));
        let (mut new, mut attention) = (0, 0.0);
        let mut add = |tokens: i64, after: i64| {
            new += tokens;
            attention += tokens as f64 * (after as f64 + tokens as f64 * 0.5);
        };
        for (at, &job) in self.prefilling.iter().enumerate() {
            let planned = self.plan.get(at).filter(|_| self.step_end.is_some());
            let planned = planned.map_or(0, |&(_, chunk)| chunk);
            let left = jobs[job].todo - planned;
            if left > 0 {
                add(left, jobs[job].done + planned);
            }
        }
        marks.begin();
        for &job in &self.waiting {
            let job = &jobs[job];
            let ids = &job.request.blocks;
            let mut hit = blocks.prefix(self.number, ids);
            // What an earlier one of the queue computes is there by then.
            while hit < ids.len() && marks.has(ids[hit]) {
                hit += 1;
            }
            let cached = (hit as i64 * p.block).min(job.request.prompt);
            add((job.length() - cached).max(ALWAYS_COMPUTED), cached);
            for &block in &ids[hit..] {
                marks.set(block);
            }
        }
        if new == 0 {
            return running;
        }
        let budget = (p.budget - self.decoding).max(1);
        let (u, decoding) = (new as f64, self.decoding as f64);
        let steps = u / budget as f64;
        let step = p.overhead + p.context * self.contexts as f64 + p.decode * decoding;
        running + (u * p.prefill + steps * step + p.attention * attention) / self.speed
    }
}

/// A set of blocks that is emptied at no cost.
#[derive(Debug, Default)]
pub(crate) struct Marks {
    rounds: Vec<u32>,
    round: u32,
}

impl Marks {
    /// Makes room for blocks with numbers below `blocks`.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        if self.rounds.len() < blocks {
            self.rounds.resize(blocks, 0);
        }
    }

    fn begin(&mut self) {
        self.round += 1;
    }

    fn has(&self, block: Block) -> bool {
        self.rounds[block as usize] == self.round
    }

    fn set(&mut self, block: Block) {
        self.rounds[block as usize] = self.round;
    }
}
