//! What an engine streams, read as it comes: when the first and the last text came, and what it counted.

use std::time::Duration;

use serde_json::Value;

/// A streamed answer; times are since its request was due.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Answer {
    /// When its first text came, and its last.
    pub(crate) first: Option<Duration>,
    pub(crate) last: Option<Duration>,
    pub(crate) text: String,
    pub(crate) usage: Option<Usage>,
    /// Whether the stream said that it ended.
    pub(crate) done: bool,
    /// A line that has not ended yet.
    line: Vec<u8>,
}

/// What the engine counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: u32,
    pub(crate) completion: u32,
    /// Of the prompt, found in the engine's cache; `None` if it does not say.
    pub(crate) cached: Option<u32>,
}

impl Answer {
    /// Takes the next bytes.
    ///
    /// # Errors
    /// An event cannot be read, or tells of an error.
    pub(crate) fn take(&mut self, bytes: &[u8], at: Duration) -> Result<(), String> {
        for part in bytes.split_inclusive(|byte| *byte == b'\n') {
            self.line.extend_from_slice(part);
            if part.ends_with(b"\n") {
                let line = std::mem::take(&mut self.line);
                self.event(&line, at)?;
            }
        }
        Ok(())
    }

    fn event(&mut self, line: &[u8], at: Duration) -> Result<(), String> {
        let Some(data) = line.strip_prefix(b"data:") else { return Ok(()) };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Value = serde_json::from_slice(data)
            .map_err(|error| format!("an event that is no JSON ({error})"))?;
        if let Some(error) = event.get("error") {
            return Err(format!("the engine says {error}"));
        }
        // The first event has a role and no text: it is sent before the prompt is read.
        let text = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        if !text.is_empty() {
            self.first.get_or_insert(at);
            self.last = Some(at);
            self.text.push_str(text);
        }
        self.usage = Usage::of(&event).or(self.usage);
        Ok(())
    }

    /// Returns what was counted if it ended well.
    ///
    /// # Errors
    /// It did not.
    pub(crate) fn counted(&self) -> Result<Usage, String> {
        if !self.done {
            return Err("the stream ended early".to_owned());
        }
        if self.first.is_none() {
            return Err("an answer without text".to_owned());
        }
        self.usage.ok_or_else(|| "an answer without usage".to_owned())
    }
}

impl Usage {
    /// Reads an event or a whole answer; llama.cpp says in two places what was cached.
    pub(crate) fn of(answer: &Value) -> Option<Self> {
        let count = |value: &Value| value.as_u64().and_then(|count| u32::try_from(count).ok());
        let usage = answer.get("usage").filter(|usage| usage.is_object())?;
        Some(Self {
            prompt: count(&usage["prompt_tokens"])?,
            completion: count(&usage["completion_tokens"])?,
            cached: count(&usage["prompt_tokens_details"]["cached_tokens"])
                .or_else(|| count(&answer["timings"]["cache_n"])),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":null}}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"content\":\"Yes\"}}]}\n\n\
        : a comment\n\
        data: {\"choices\":[{\"delta\":{\"content\":\", é.\"}}]}\r\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":40,\"completion_tokens\":3,\
        \"prompt_tokens_details\":{\"cached_tokens\":32}}}\n\n\
        data: [DONE]\n\n";

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn a_stream_is_the_same_however_it_is_cut() {
        let whole = |pieces: &[&[u8]]| {
            let mut answer = Answer::default();
            pieces.iter().for_each(|piece| answer.take(piece, ms(7)).unwrap());
            answer
        };
        let expected = whole(&[STREAM.as_bytes()]);
        let usage = Usage { prompt: 40, completion: 3, cached: Some(32) };
        assert_eq!(expected.counted(), Ok(usage));
        assert_eq!(expected.text, "Yes, é.");
        for at in 0..STREAM.len() {
            let (head, tail) = STREAM.as_bytes().split_at(at);
            assert_eq!(whole(&[head, tail]), expected, "cut at {at}");
        }
    }

    #[test]
    fn the_first_and_the_last_text_have_their_times() {
        let mut answer = Answer::default();
        for (line, at) in STREAM.split_inclusive('\n').zip(0..) {
            answer.take(line.as_bytes(), ms(at)).unwrap();
        }
        assert_eq!((answer.first, answer.last), (Some(ms(2)), Some(ms(5))));
    }

    #[test]
    fn what_does_not_end_well_says_so() {
        let counted = |text: &str| {
            let mut answer = Answer::default();
            answer.take(text.as_bytes(), ms(1)).and_then(|()| answer.counted())
        };
        let early = STREAM.replace("data: [DONE]", "");
        assert_eq!(counted(&early), Err("the stream ended early".to_owned()));
        assert_eq!(counted("data: [DONE]\n"), Err("an answer without text".to_owned()));
        assert!(counted("data: {oops\n").unwrap_err().contains("no JSON"));
        assert!(counted("data: {\"error\":{\"code\":500}}\n").unwrap_err().contains("500"));
        let uncounted = STREAM.replace("usage", "use");
        assert_eq!(counted(&uncounted), Err("an answer without usage".to_owned()));
    }

    #[test]
    fn timings_say_what_was_cached_where_usage_does_not() {
        let answer = serde_json::json!({
            "usage": { "prompt_tokens": 9, "completion_tokens": 1 }, "timings": { "cache_n": 4 },
        });
        assert_eq!(Usage::of(&answer), Some(Usage { prompt: 9, completion: 1, cached: Some(4) }));
    }
}
