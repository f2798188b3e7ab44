//! A model's chat template: from messages to the one text that the engine tokenizes.

use jiff::Timestamp;
use jiff::fmt::strtime;
use jiff::tz::TimeZone;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::python::{Floats, Layout, NoJson, json, text};

/// The name under which an environment holds its one template.
const NAME: &str = "chat";

/// The variable that carries the time of a rendering; no template has a use for such a name.
const NOW: &str = "__now";

/// What a message's content is given to the template as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ContentFormat {
    /// One text.
    Text,
    /// A list of parts, each with a `type`.
    Parts,
}

/// A compiled chat template.
pub(crate) struct Template {
    environment: Environment<'static>,
    pub(crate) content: ContentFormat,
    /// Whether the model's answers may open with a thought.
    pub(crate) thinks: bool,
    /// Whether it has a use for the role `developer`.
    pub(crate) knows_developer: bool,
}

impl Template {
    /// Compiles `source` with the settings the engines use: those of Hugging Face's `apply_chat_template`.
    ///
    /// # Errors
    /// If it is not a template.
    pub(crate) fn new(source: &str, floats: Floats) -> Result<Self, Error> {
        let source = without_generation_marks(source);
        // Its escaping goes by file name: the one template has none that asks for it.
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        environment.set_syntax(syntax);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(
            move |out: &mut Output<'_>, _state: &mut State<'_, '_>, value: &Value| match value
                .as_str()
            {
                Some(plain) => out.write_str(plain).map_err(Error::from),
                None => out.write_str(&text(value, floats)).map_err(Error::from),
            },
        );
        environment.add_filter("tojson", move |value: &Value, kwargs: Kwargs| {
            to_json(value, &kwargs, floats)
        });
        environment.add_filter("string", move |value: &Value| text(value, floats));
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let content = content_format(&source);
        let (thinks, knows_developer) = (source.contains("think"), source.contains("developer"));
        environment.add_template_owned(NAME, source)?;
        Ok(Self { environment, content, thinks, knows_developer })
    }

    /// Renders the template at the time `now`.
    ///
    /// # Errors
    /// If the template says that it cannot take these messages, or runs into a fault.
    pub(crate) fn render(
        &self,
        variables: Vec<(String, Value)>,
        now: Timestamp,
    ) -> Result<String, Error> {
        let now = Value::from(now.as_second());
        let variables = variables.into_iter().chain([(NOW.to_owned(), now)]);
        self.environment.get_template(NAME)?.render(Value::from_pairs(variables))
    }
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Template").field("content", &self.content).finish_non_exhaustive()
    }
}

fn to_json(value: &Value, kwargs: &Kwargs, floats: Floats) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let mut layout = Layout::plain(indent, floats);
    if let Some(ascii) = kwargs.get::<Option<bool>>("ensure_ascii")? {
        layout.ensure_ascii = ascii;
    }
    if let Some(sort) = kwargs.get::<Option<bool>>("sort_keys")? {
        layout.sort_keys = sort;
    }
    if let Some(separators) = kwargs.get::<Option<Vec<String>>>("separators")? {
        let [item, key] = <[String; 2]>::try_from(separators)
            .map_err(|_unused| Error::new(ErrorKind::InvalidOperation, "separators are two"))?;
        (layout.item, layout.key) = (item, key);
    }
    kwargs.assert_all_used()?;
    let text = json(value, &layout).map_err(|NoJson(kind)| {
        Error::new(ErrorKind::BadSerialization, format!("{kind} is not JSON"))
    })?;
    Ok(Value::from_safe_string(text))
}

fn raise_exception(message: &str) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.to_owned()))
}

/// The time in UTC, which is what containers run in.
fn strftime_now(state: &State<'_, '_>, format: &str) -> Result<String, Error> {
    let seconds = state.lookup(NOW).and_then(|now| now.as_i64()).unwrap_or_default();
    let fault = |error: jiff::Error| Error::new(ErrorKind::InvalidOperation, error.to_string());
    let now = Timestamp::from_second(seconds).map_err(fault)?.to_zoned(TimeZone::UTC);
    strtime::format(format, &now).map_err(fault)
}

/// Takes out the marks of what a model is to be trained on: they print nothing, and are no part of the language.
fn without_generation_marks(source: &str) -> String {
    let mut rest = source;
    let mut out = String::with_capacity(source.len());
    while let Some(start) = rest.find("{%") {
        let Some(length) = rest[start..].find("%}") else { break };
        let tag = &rest[start..start + length + 2];
        let name = tag[2..length].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let end = start + tag.len();
        if matches!(name, "generation" | "endgeneration") {
            out.push_str(&rest[..start]);
            // A tag that says the same about white space and prints nothing.
            let (left, right) = (tag.starts_with("{%-"), tag.ends_with("-%}"));
            out.push_str(if left { "{%- " } else { "{% " });
            out.push_str("set __mark = 0");
            out.push_str(if right { " -%}" } else { " %}" });
        } else {
            out.push_str(&rest[..end]);
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

/// Finds out which content a template is written for, as vLLM does: parts if it loops over the content of a message
/// of a loop over the messages.
fn content_format(source: &str) -> ContentFormat {
    let tags: Vec<&str> = source
        .split("{%")
        .skip(1)
        .filter_map(|rest| rest.split_once("%}"))
        .map(|(tag, _)| tag.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace()))
        .collect();
    let mut lists = vec!["messages"];
    let mut next = 0;
    while let Some(&list) = lists.get(next) {
        for tag in &tags {
            let assignment = tag.strip_prefix("set ").and_then(|rest| rest.split_once('='));
            if let Some((name, value)) = assignment
                && base(value) == list
                && !lists.contains(&name.trim())
            {
                lists.push(name.trim());
            }
        }
        next += 1;
    }
    let loops: Vec<(&str, &str)> = tags
        .iter()
        .filter_map(|tag| tag.strip_prefix("for ")?.split_once(" in "))
        .map(|(name, over)| (name.trim(), base(over.split(" if ").next().unwrap_or_default())))
        .collect();
    let messages: Vec<&str> =
        loops.iter().filter(|(_, over)| lists.contains(over)).map(|(name, _)| *name).collect();
    let over_content = loops.iter().any(|(_, over)| {
        ["['content']", "[\"content\"]", ".content"]
            .iter()
            .any(|access| over.strip_suffix(access).is_some_and(|name| messages.contains(&name)))
    });
    if over_content { ContentFormat::Parts } else { ContentFormat::Text }
}

/// What an expression is about, without filters, tests and slices after it.
fn base(expression: &str) -> &str {
    let expression = expression.split('|').next().unwrap_or_default();
    let expression = expression.split(" is ").next().unwrap_or_default().trim();
    match expression.rfind('[') {
        Some(at) if expression[at..].contains(':') => expression[..at].trim(),
        Some(_) | None => expression,
    }
}

/// Cuts a rendered text right after the content of its last message, for the model to go on from there.
///
/// The rule is that of Hugging Face's `continue_final_message`. `None` if the content is not in the text.
pub(crate) fn cut_after(mut rendered: String, last: &str) -> Option<String> {
    let at = rendered.rfind(last.trim())?;
    let spaced = last.trim_start();
    let length = if rendered[at..].starts_with(spaced) { spaced.len() } else { last.trim().len() };
    rendered.truncate(at + length);
    Some(rendered)
}

#[cfg(test)]
mod tests;
