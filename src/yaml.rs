//! YAML for people: one document into a typed value, and errors that say where, what, and which word was meant.

use serde::Deserialize as _;
use serde::de::{DeserializeOwned, Error as _};

/// Parses a text that holds one document, or nothing, which is the default.
///
/// # Errors
/// The text begins with line and column: `3:5: unknown key ...`.
pub fn parse<T: DeserializeOwned + Default>(text: &str) -> Result<T, String> {
    let mut documents = serde_yaml::Deserializer::from_str(text);
    let (first, second) = (documents.next(), documents.next());
    let result = match (first, second) {
        (_, Some(_)) => Err(serde_yaml::Error::custom("there are two YAML documents; one is expected")),
        (Some(document), None) => Option::<T>::deserialize(document).map(Option::unwrap_or_default),
        (None, None) => Ok(T::default()),
    };
    result.map_err(|error| explain(&error))
}


/// Turns the parser's words into a place, a cause and a remedy.
fn explain(error: &serde_yaml::Error) -> String {
    let place =
        error.location().map_or_else(|| "1:1".to_owned(), |at| format!("{}:{}", at.line(), at.column()));
    let text = error.to_string();
    let text = without_location(&text);
    let Some((path, rest)) = text.split_once("unknown field `") else {
        return format!("{place}: {text}");
    };
    let path = path.trim_end_matches(": ");
    let (key, known) = rest.split_once('`').unwrap_or((rest, ""));
    let known: Vec<&str> = known.split('`').skip(1).step_by(2).collect();
    let hint = did_you_mean(key, known.iter().copied());
    let within = if path.is_empty() { String::new() } else { format!(" in `{path}`") };
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    format!("{place}: unknown key `{key}`{within}{hint} (known: {known})")
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
