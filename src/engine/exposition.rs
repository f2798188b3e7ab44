//! Prometheus text, as model servers print it: one pass over the bytes that stops at the wanted names alone.
//!
//! Read are the text format 0.0.4, OpenMetrics (`# EOF`, exemplars, timestamps in seconds) and the quoted names of the
//! UTF-8 form. Most of a page is histograms that nobody asks for: of those lines only the name is looked at. Nothing
//! is allocated; labels are read when they are asked for.

use std::borrow::Cow;

/// What a pass came across.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Scan {
    /// Samples with a wanted name.
    pub samples: u32,
    /// Lines that are no metrics, and lines with a wanted name that cannot be read. They are left out.
    pub unread: u32,
}

/// The names of samples that are wanted.
///
/// Nearly every line of a page has another name, most of them with the same beginning. Eight bytes after that
/// beginning tell at once.
#[derive(Debug, Clone)]
pub struct Names {
    names: Vec<&'static str>,
    /// Where the eight bytes begin.
    at: usize,
    /// Those of each name; none if one of the names is too short for it.
    keys: Vec<u64>,
}

const KEY: usize = 8;

fn key(text: &[u8], at: usize) -> Option<u64> {
    text.get(at..)?.first_chunk::<KEY>().map(|bytes| u64::from_le_bytes(*bytes))
}

impl Names {
    /// Takes the names; of equal ones the first is found.
    #[must_use]
    pub fn new(names: Vec<&'static str>) -> Self {
        let shortest = names.iter().map(|name| name.len()).min().unwrap_or(0);
        let first = names.first().map_or(&b""[..], |name| name.as_bytes());
        let common = (0..shortest)
            .take_while(|&at| names.iter().all(|name| name.as_bytes()[at] == first[at]))
            .count();
        let at = common.min(shortest.saturating_sub(KEY));
        let keys: Option<Vec<u64>> = names.iter().map(|name| key(name.as_bytes(), at)).collect();
        let mut keys = keys.unwrap_or_default();
        keys.sort_unstable();
        keys.dedup();
        Self { names, at, keys }
    }

    /// Returns which name a line begins with, and what follows it.
    fn begin<'a>(&self, line: &'a [u8]) -> Option<(usize, &'a [u8])> {
        if !self.keys.is_empty() {
            let key = key(line, self.at)?;
            // All of them, without a branch for each.
            if !self.keys.iter().fold(false, |found, known| found | (*known == key)) {
                return None;
            }
        }
        self.names.iter().enumerate().find_map(|(at, name)| {
            let rest = line.strip_prefix(name.as_bytes())?;
            matches!(rest.first(), None | Some(b'{' | b' ' | b'\t' | b'\r')).then_some((at, rest))
        })
    }

    fn find(&self, name: &[u8]) -> Option<usize> {
        self.names.iter().position(|it| it.as_bytes() == name)
    }
}

/// Calls `found` with the index of the name, the labels and the value of every sample whose name is `wanted`, in the
/// order of the page.
///
/// A last line without a line feed is not read: the format ends every line with one, and half of a number is a number.
pub fn scan<'a>(
    page: &'a [u8],
    wanted: &Names,
    mut found: impl FnMut(usize, Labels<'a>, f64),
) -> Scan {
    let mut scan = Scan::default();
    let mut start = 0;
    for end in memchr::memchr_iter(b'\n', page) {
        let line = &page[start..end];
        start = end + 1;
        match read(line, wanted) {
            Line::Other => {}
            Line::Unread => scan.unread = scan.unread.saturating_add(1),
            Line::Sample(name, labels, value) => {
                scan.samples = scan.samples.saturating_add(1);
                found(name, labels, value);
            }
        }
    }
    if !page[start..].trim_ascii().is_empty() {
        scan.unread = scan.unread.saturating_add(1);
    }
    scan
}

enum Line<'a> {
    /// Blank, a comment, or a sample that nobody asked for.
    Other,
    Unread,
    Sample(usize, Labels<'a>, f64),
}

fn read<'a>(line: &'a [u8], wanted: &Names) -> Line<'a> {
    let line = match line.first() {
        Some(b' ' | b'\t' | b'\r') => line.trim_ascii_start(),
        _ => line,
    };
    match line.first() {
        None | Some(b'#') => Line::Other,
        Some(b'a'..=b'z' | b'A'..=b'Z' | b'_' | b':') => match wanted.begin(line) {
            Some((name, rest)) => sample(name, rest).unwrap_or(Line::Unread),
            None => Line::Other,
        },
        Some(b'{') => quoted(line, wanted),
        Some(_) => Line::Unread,
    }
}

/// Reads what follows a name.
fn sample(name: usize, rest: &[u8]) -> Option<Line<'_>> {
    let rest = rest.trim_ascii_start();
    let (labels, rest) = match rest.strip_prefix(b"{") {
        Some(inside) => Labels::split(inside)?,
        None => (Labels(b""), rest),
    };
    Some(Line::Sample(name, labels, value(rest)?))
}

/// Reads a line of the UTF-8 form: `{"a name",label="value"} 1`.
fn quoted<'a>(line: &'a [u8], wanted: &Names) -> Line<'a> {
    let read = || {
        let (Text(name), rest) = string(line[1..].trim_ascii_start())?;
        let rest = rest.trim_ascii_start();
        let (labels, rest) = Labels::split(rest.strip_prefix(b",").unwrap_or(rest))?;
        Some((name, labels, rest))
    };
    match read() {
        // An escaped name is not what anybody wants: no engine has one.
        Some((name, labels, rest)) => match (wanted.find(name), value(rest)) {
            (Some(name), Some(value)) => Line::Sample(name, labels, value),
            (Some(_), None) => Line::Unread,
            (None, _) => Line::Other,
        },
        None => Line::Unread,
    }
}

/// Reads the value, and makes sure that no more follows it than a timestamp and an exemplar.
fn value(rest: &[u8]) -> Option<f64> {
    let (value, rest) = word(rest);
    let value = number(value)?;
    let (next, rest) = word(rest);
    let next = match next.first() {
        None => return Some(value),
        Some(b'#') => next,
        Some(_) => {
            number(next)?;
            word(rest).0
        }
    };
    (next.is_empty() || next.starts_with(b"#")).then_some(value)
}

fn number(word: &[u8]) -> Option<f64> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// Splits at the first blank, after blanks at the start.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    let text = text.trim_ascii_start();
    let end = text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len());
    text.split_at(end)
}

/// Reads a string in double quotes; returns what is in it and what follows it.
fn string(text: &[u8]) -> Option<(Text<'_>, &[u8])> {
    let text = text.strip_prefix(b"\"")?;
    let mut at = 0;
    loop {
        at += memchr::memchr2(b'"', b'\\', text.get(at..)?)?;
        if text[at] == b'"' {
            return Some((Text(&text[..at]), &text[at + 1..]));
        }
        at += 2;
    }
}

/// The labels of a sample, as they stand on the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Labels<'a>(&'a [u8]);

impl<'a> Labels<'a> {
    /// Splits at the brace that ends the labels; `None` if they are not well formed.
    fn split(text: &'a [u8]) -> Option<(Self, &'a [u8])> {
        let mut rest = text.trim_ascii_start();
        loop {
            if let Some(after) = rest.strip_prefix(b"}") {
                return Some((Self(&text[..text.len() - rest.len()]), after));
            }
            let after = pair(rest)?.2;
            rest = match after.strip_prefix(b",") {
                Some(after) => after.trim_ascii_start(),
                None if after.starts_with(b"}") => after,
                None => return None,
            };
        }
    }

    /// Returns the value of a label, as text on the page; of a label that stands twice, the first.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Text<'a>> {
        self.iter().find(|(Text(known), _)| *known == name.as_bytes()).map(|(_, value)| value)
    }

    /// Yields names and values in the order of the page.
    pub fn iter(&self) -> impl Iterator<Item = (Text<'a>, Text<'a>)> + use<'a> {
        let mut rest = self.0.trim_ascii_start();
        std::iter::from_fn(move || {
            let (name, value, after) = pair(rest)?;
            rest = after.strip_prefix(b",").unwrap_or_default().trim_ascii_start();
            Some((name, value))
        })
    }
}

/// Reads `name="value"`; returns also what follows it and blanks.
fn pair(text: &[u8]) -> Option<(Text<'_>, Text<'_>, &[u8])> {
    let (name, rest) = match text.first()? {
        b'"' => string(text)?,
        _ => {
            let end = memchr::memchr(b'=', text)?;
            (Text(text[..end].trim_ascii_end()), &text[end..])
        }
    };
    let rest = rest.trim_ascii_start().strip_prefix(b"=")?.trim_ascii_start();
    let (value, rest) = string(rest)?;
    Some((name, value, rest.trim_ascii_start()))
}

/// Text as it stands on the page, with its escapes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Text<'a>(&'a [u8]);

impl<'a> Text<'a> {
    /// Returns the text without escapes; bytes that are no UTF-8 become U+FFFD. Borrowed when there is nothing to do.
    #[must_use]
    pub fn text(self) -> Cow<'a, str> {
        if memchr::memchr(b'\\', self.0).is_none() {
            return String::from_utf8_lossy(self.0);
        }
        let (mut plain, mut rest) = (Vec::with_capacity(self.0.len()), self.0);
        while let Some(at) = memchr::memchr(b'\\', rest) {
            plain.extend_from_slice(&rest[..at]);
            match rest.get(at + 1) {
                Some(b'n') => plain.push(b'\n'),
                Some(b'"') => plain.push(b'"'),
                Some(b'\\') => plain.push(b'\\'),
                // The format knows no other escape: such a backslash is one.
                Some(&other) => plain.extend([b'\\', other]),
                None => plain.push(b'\\'),
            }
            rest = rest.get(at + 2..).unwrap_or_default();
        }
        plain.extend_from_slice(rest);
        Cow::Owned(String::from_utf8_lossy(&plain).into_owned())
    }

    /// Returns the text as a number, if it is one without an escape.
    #[must_use]
    pub fn number<N: std::str::FromStr>(self) -> Option<N> {
        std::str::from_utf8(self.0).ok()?.parse().ok()
    }

    /// Returns the bytes on the page, escapes and all.
    #[must_use]
    pub fn raw(self) -> &'a [u8] {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Owned = (String, Vec<(String, String)>, f64);

    fn all(page: &[u8], names: &[&str]) -> (Vec<Owned>, Scan) {
        let names: Vec<&'static str> =
            names.iter().map(|&name| &*Box::leak(name.to_owned().into_boxed_str())).collect();
        let mut samples = Vec::new();
        let scan = scan(page, &Names::new(names.clone()), |name, labels, value| {
            let labels = labels
                .iter()
                .map(|(name, value)| (name.text().into_owned(), value.text().into_owned()))
                .collect();
            samples.push((names[name].to_owned(), labels, value));
        });
        (samples, scan)
    }

    /// The names on a page, found the slow way.
    fn names(page: &str) -> Vec<&str> {
        let lines = page.lines().filter(|line| !line.starts_with('#'));
        let mut names: Vec<&str> = lines.filter_map(|line| line.split(['{', ' ']).next()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn one(line: &str) -> Option<Owned> {
        let (mut samples, scan) = all(format!("{line}\n").as_bytes(), &["m:x"]);
        assert!(samples.len() <= 1 && samples.len() == scan.samples as usize);
        samples.pop()
    }

    fn values(line: &str) -> Option<f64> {
        one(line).map(|(_, _, value)| value)
    }

    fn labels(line: &str) -> Vec<(String, String)> {
        one(line).unwrap().1
    }

    #[test]
    fn a_value_may_be_anything_that_a_float_may_be() {
        for (line, value) in [
            ("m:x 1", 1.0),
            ("m:x\t1e3", 1000.0),
            ("m:x{} 0.5 ", 0.5),
            ("  m:x { } -2", -2.0),
            ("m:x +Inf", f64::INFINITY),
            ("m:x -Inf", f64::NEG_INFINITY),
            ("m:x 1e309", f64::INFINITY),
            ("m:x 7\r", 7.0),
            ("m:x 7 1700000000000", 7.0),
            ("m:x 7 1700000000.123 # {trace_id=\"a b\"} 0.5 1.2", 7.0),
            ("m:x 7 # {trace_id=\"a\"} 0.5", 7.0),
        ] {
            assert_eq!(values(line), Some(value), "{line}");
        }
        assert!(values("m:x NaN").unwrap().is_nan());
        for line in [
            "m:x",
            "m:x one",
            "m:x{",
            "m:x{a=\"} 1",
            "m:x{a=\"b\"}",
            "m:x{a=b} 1",
            "m:x{a=\"b\" c=\"d\"} 1",
            "m:x 1 2 3",
            "m:x 1 z",
        ] {
            let (samples, scan) = all(format!("{line}\n").as_bytes(), &["m:x"]);
            assert_eq!((samples.len(), scan), (0, Scan { samples: 0, unread: 1 }), "{line}");
        }
    }

    #[test]
    fn labels_keep_what_is_escaped_in_them() {
        let owned = |pairs: &[(&str, &str)]| -> Vec<(String, String)> {
            pairs.iter().map(|&(a, b)| (a.to_owned(), b.to_owned())).collect()
        };
        for (line, pairs) in [
            (r#"m:x{a="1",b=""} 1"#, owned(&[("a", "1"), ("b", "")])),
            (r#"m:x{ a = "1" , b = "2" , } 1"#, owned(&[("a", "1"), ("b", "2")])),
            (r#"m:x{a="}{,=\"\\\n模"} 1"#, owned(&[("a", "}{,=\"\\\n模")])),
            (r#"m:x{a="\q\\"} 1"#, owned(&[("a", r"\q\")])),
            (r#"{"m:x"} 1"#, owned(&[])),
            (r#"{"m:x",a="1","b c"="2"} 1"#, owned(&[("a", "1"), ("b c", "2")])),
        ] {
            assert_eq!(labels(line), pairs, "{line}");
        }
    }

    #[test]
    fn what_is_no_metric_is_counted_and_skipped() {
        let page = b"<html>\n# HELP m:x text\n# HELP m:x text\n# TYPE m:x frobnicate\n\n{\"m:x\" 1\nother{broken 5\n\
            m:x 1\n\xff\xfe\nm:x 2\n# EOF\nm:x 3";
        let (samples, scan) = all(page, &["m:x"]);
        assert_eq!(samples.iter().map(|it| it.2).collect::<Vec<_>>(), [1.0, 2.0]);
        assert_eq!(scan, Scan { samples: 2, unread: 4 });
    }

    #[test]
    fn crlf_pages_read_like_others() {
        let page = include_str!("testdata/vllm-0.32.0.txt");
        let crlf = page.replace('\n', "\r\n");
        let names = names(page);
        assert_eq!(all(page.as_bytes(), &names), all(crlf.as_bytes(), &names));
    }

    #[test]
    fn every_line_of_a_real_page_is_read() {
        for page in [
            include_str!("testdata/vllm-0.32.0.txt"),
            include_str!("testdata/llama.cpp-b11434.txt"),
        ] {
            let lines = page.lines().filter(|line| !line.starts_with('#')).count();
            let (samples, scan) = all(page.as_bytes(), &names(page));
            assert_eq!((samples.len(), scan.unread), (lines, 0));
            // One name at a time, and so with other keys, it is the same.
            let one: usize =
                names(page).iter().map(|&name| all(page.as_bytes(), &[name]).0.len()).sum();
            assert_eq!(one, lines);
        }
    }

    #[test]
    fn a_longer_name_is_another() {
        let page = b"vllm:num_requests_waiting_by_reason 3\nvllm:num_requests 1\nvllm:num_requests_waiting 2\n";
        let found = all(page, &["vllm:num_requests_waiting", "vllm:num_requests_running"]);
        assert_eq!(found.0, [("vllm:num_requests_waiting".to_owned(), Vec::new(), 2.0)]);
        assert_eq!(found.1, Scan { samples: 1, unread: 0 });
    }

    /// A line as an exporter prints it.
    fn print((name, labels, value): &Owned) -> String {
        let labels: Vec<String> = labels
            .iter()
            .map(|(name, value)| {
                let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
                format!("{name}=\"{value}\"")
            })
            .collect();
        if labels.is_empty() {
            format!("{name} {value}\n")
        } else {
            format!("{name}{{{}}} {value}\n", labels.join(","))
        }
    }

    fn any_sample() -> impl Strategy<Value = Owned> {
        let labels = prop::collection::vec(("[a-z_][a-z0-9_]{0,6}", any::<String>()), 0..4);
        ("[a-zA-Z_:][a-zA-Z0-9_:]{0,12}", labels, prop::num::f64::ANY)
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read(samples in prop::collection::vec(any_sample(), 0..8)) {
            let page: String = samples.iter().map(print).collect();
            let names: Vec<&str> = samples.iter().map(|it| it.0.as_str()).collect();
            let (read, scan) = all(page.as_bytes(), &names);
            prop_assert_eq!(scan.unread, 0);
            prop_assert_eq!(read.len(), samples.len());
            for (read, sample) in read.iter().zip(&samples) {
                prop_assert_eq!((&read.0, &read.1), (&sample.0, &sample.1));
                prop_assert!(read.2 == sample.2 || read.2.is_nan() && sample.2.is_nan());
            }
        }

        #[test]
        fn a_name_is_found_among_others_as_it_is_alone(
            samples in prop::collection::vec(any_sample(), 0..8), pick in any::<prop::sample::Index>(),
        ) {
            prop_assume!(!samples.is_empty());
            let name = pick.get(&samples).0.clone();
            let page: String = samples.iter().map(print).collect();
            let (read, _) = all(page.as_bytes(), &[&name]);
            let alone: Vec<_> = samples.iter().filter(|it| it.0 == name).cloned().collect();
            prop_assert_eq!(format!("{read:?}"), format!("{alone:?}"));
        }

        #[test]
        fn any_bytes_are_survived(page in prop::collection::vec(any::<u8>(), 0..400)) {
            all(&page, &["a", "b"]);
        }

        #[test]
        fn anything_like_a_page_is_survived(page in "[a:{}\"\\\\=, \t\r\n#0-9.eE+NaIif-]{0,200}") {
            let (samples, scan) = all(page.as_bytes(), &["a", ":", "aaaaaaaaa"]);
            prop_assert_eq!(samples.len(), scan.samples as usize);
            let lines = page.bytes().filter(|&it| it == b'\n').count() + 1;
            prop_assert!((scan.samples + scan.unread) as usize <= lines);
        }

        /// Whatever is cut off, the lines before it read as before and no number is halved.
        #[test]
        fn a_page_cut_off_is_its_whole_lines(at in any::<prop::sample::Index>()) {
            let page = include_bytes!("testdata/llama.cpp-b11434.txt");
            let cut = &page[..at.index(page.len() + 1)];
            let whole = memchr::memrchr(b'\n', cut).map_or(&b""[..], |end| &cut[..=end]);
            let names = names(std::str::from_utf8(page).unwrap());
            prop_assert_eq!(all(cut, &names).0, all(whole, &names).0);
        }
    }
}
