//! YAML for people: one document into a typed value, and errors that say where, what, and which word was meant.

use serde::Deserialize as _;
use serde::de::DeserializeOwned;
use serde_path_to_error::{Path, Segment};

/// Parses a text that holds one document, or nothing, which is the default.
///
/// # Errors
/// The text begins with line and column: `3:5: unknown key ...`.
pub fn parse<T: DeserializeOwned + Default>(text: &str) -> Result<T, String> {
    let mut documents = serde_yaml::Deserializer::from_str(text);
    let (first, second) = (documents.next(), documents.next());
    if second.is_some() {
        // A syntax error counts as a second document here; reading the whole text tells them apart.
        return match serde_yaml::from_str::<serde_yaml::Value>(text) {
            Err(error) if error.location().is_some() => {
                Err(explain(text, &serde_path_to_error::Track::new().path(), &error))
            }
            Err(_) | Ok(_) => Err("1:1: there are two YAML documents; one is expected".to_owned()),
        };
    }
    let Some(document) = first else { return Ok(T::default()) };
    let mut track = serde_path_to_error::Track::new();
    let result =
        Option::<T>::deserialize(serde_path_to_error::Deserializer::new(document, &mut track));
    result
        .map(Option::unwrap_or_default)
        .map_err(|error: serde_yaml::Error| explain(text, &track.path(), &error))
}

/// Turns the parser's words into a place, a cause and a remedy.
fn explain(text: &str, path: &Path, error: &serde_yaml::Error) -> String {
    let message = error.to_string();
    // The parser puts the path that it knows in front.
    let cause = without_location(&message);
    let cause = cause
        .split_once(": ")
        .map_or(cause, |(front, rest)| if front.contains(' ') { cause } else { rest });
    let at = |place: Option<(usize, usize)>| {
        place.map_or_else(String::new, |(line, column)| format!("{line}:{column}: "))
    };
    let parsers = error.location().map(|place| (place.line(), place.column()));
    if let Some((_, rest)) = cause.split_once("unknown variant `") {
        let (value, known) = quoted(rest);
        let message = unknown("value", value, &known);
        return format!("{}`{path}`: {message}", at(locate(text, path).or(parsers)));
    }
    let Some((_, rest)) = cause.split_once("unknown field `") else {
        // A value that our own types refuse is known by its path alone: the parser only knows the mapping around it.
        return match path.iter().next() {
            None => format!("{}{cause}", at(parsers)),
            Some(_) => format!("{}`{path}`: {cause}", at(locate(text, path).or(parsers))),
        };
    };
    let (key, known) = quoted(rest);
    let hint = did_you_mean(key, known.iter().copied());
    let path = path.to_string();
    let parent = path.strip_suffix(key).unwrap_or(&path).trim_end_matches('.');
    let within = if parent.is_empty() { String::new() } else { format!(" in `{parent}`") };
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    format!("{}unknown key `{key}`{within}{hint} (known: {known})", at(parsers))
}

/// Takes `wrong`, and then the words in backticks after it.
fn quoted(rest: &str) -> (&str, Vec<&str>) {
    let (wrong, known) = rest.split_once('`').unwrap_or((rest, ""));
    (wrong, known.split('`').skip(1).step_by(2).collect())
}

/// Says that there is no `kind` of that name, which one was probably meant, and which there are.
#[must_use]
pub fn unknown(kind: &str, name: &str, known: &[&str]) -> String {
    let hint = did_you_mean(name, known.iter().copied());
    format!("there is no {kind} `{name}`{hint} (known: {})", known.join(", "))
}

/// Finds the line and the column of the last key of a path, by looking for each key behind the one around it.
fn locate(text: &str, path: &Path) -> Option<(usize, usize)> {
    let mut from = 0;
    let mut found = None;
    for segment in path {
        match segment {
            Segment::Map { key } => {
                let start = from + key_in(&text[from..], key)?;
                found = Some(start);
                from = start + key.len();
            }
            Segment::Seq { index } => {
                // In flow style the items have no dashes; then the keys that follow must do.
                let dashes = text[from..].match_indices("- ").map(|(at, _)| from + at);
                if let Some(dash) = dashes
                    .filter(|&at| {
                        text[..at].rsplit('\n').next().is_some_and(|l| l.trim().is_empty())
                    })
                    .nth(*index)
                {
                    found = Some(dash);
                    from = dash;
                }
            }
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    let before = &text[..found?];
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |line| line.chars().count()) + 1;
    Some((line, column))
}

/// Finds `key` where it stands as one: not within a word, and before a colon.
fn key_in(text: &str, key: &str) -> Option<usize> {
    text.match_indices(key).map(|(at, _)| at).find(|&at| {
        let before = text[..at].chars().next_back();
        let after = text[at + key.len()..].trim_start_matches(['"', '\'', ' ']);
        after.starts_with(':') && before.is_none_or(|c| c.is_whitespace() || "{,\"'-".contains(c))
    })
}

/// Drops the parser's own ` at line 1 column 2`.
#[must_use]
pub fn without_location(text: &str) -> &str {
    text.rsplit_once(" at line ").map_or(text, |(before, _)| before)
}

/// Returns `, did you mean ...?` with the name nearest to `wrong`, or nothing if none is near.
#[must_use]
pub fn did_you_mean<'a>(wrong: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    names
        .into_iter()
        .map(|name| (strsim::jaro_winkler(wrong, name), name))
        .filter(|&(similarity, _)| similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map_or_else(String::new, |(_, name)| format!(", did you mean `{name}`?"))
}
