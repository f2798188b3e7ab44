//! A chat as its engine hands it to the template: engines tidy up what a client wrote, each in its own way.
//!
//! Sources: vLLM's `chat_utils`, `renderers` and its chat protocol (0.32); llama.cpp's answers of `/apply-template`
//! (b11434).

use jiff::Timestamp;
use minijinja::Value;
use minijinja::value::ValueKind;
use serde::{Deserialize, Serialize};

use super::Failure;
use super::body::{Fields, Message, Tool};
use super::python::Floats;
use super::template::{ContentFormat, Template, cut_after};

/// The engine whose reading of requests is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    /// vLLM with Hugging Face's tokenizer and templates.
    #[default]
    Vllm,
    /// llama.cpp's server.
    LlamaCpp,
}

/// A chat request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Chat<'b> {
    pub(crate) messages: &'b [Message],
    pub(crate) fields: &'b Fields,
}

impl Chat<'_> {
    pub(crate) fn has_tools(&self) -> bool {
        self.fields.tools.as_ref().is_some_and(|tools| !tools.is_empty())
    }
}

impl Dialect {
    /// How the engine's template language prints numbers.
    pub(crate) fn floats(self) -> Floats {
        match self {
            Self::Vllm => Floats::Python,
            Self::LlamaCpp => Floats::C,
        }
    }

    /// Whether the tokenizer's own tokens are put around a rendered chat.
    pub(crate) fn adds_special_tokens(self, asked: Option<bool>) -> bool {
        match self {
            Self::Vllm => asked.unwrap_or(false),
            Self::LlamaCpp => true,
        }
    }

    /// Takes a rendered text's own first token off if the tokenizer puts the same one there.
    pub(crate) fn without_second_bos<'t>(
        self,
        text: &'t str,
        specials: &[(String, Value)],
        adds_bos: bool,
    ) -> &'t str {
        let bos = specials
            .iter()
            .find(|(name, _)| name == "bos_token")
            .and_then(|(_, token)| token.as_str());
        match (self, bos) {
            (Self::LlamaCpp, Some(bos)) if adds_bos => text.strip_prefix(bos).unwrap_or(text),
            (Self::Vllm | Self::LlamaCpp, _) => text,
        }
    }
}

/// Names that a request's `chat_template_kwargs` cannot set: the engine gives them itself, or refuses.
const TAKEN: [&str; 8] = [
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "tokenize",
    "continue_final_message",
    "return_dict",
];

/// Returns the text that the engine tokenizes.
///
/// # Errors
/// If the chat has more than text in it, or the template does not take it.
pub(crate) fn render(
    chat: &Chat<'_>,
    template: &Template,
    specials: &[(String, Value)],
    dialect: Dialect,
    now: Timestamp,
) -> Result<String, Failure> {
    match dialect {
        Dialect::Vllm => render_as_vllm(chat, template, specials, now),
        Dialect::LlamaCpp => render_as_llama(chat, template, specials, now),
    }
}

fn render_as_vllm(
    chat: &Chat<'_>,
    template: &Template,
    specials: &[(String, Value)],
    now: Timestamp,
) -> Result<String, Failure> {
    let fields = chat.fields;
    let continues = fields.continue_final_message.unwrap_or(false);
    let opens = fields.add_generation_prompt.unwrap_or(true);
    if continues && opens {
        return Err(Failure::Unsupported("add_generation_prompt with continue_final_message"));
    }
    let mut messages = Vec::with_capacity(chat.messages.len());
    for message in chat.messages {
        messages.push(message_for_vllm(message, template.content)?);
    }
    let tools = match &fields.tools {
        None => Value::from(()),
        Some(tools) => Value::from(tools.iter().map(tool_for_vllm).collect::<Result<Vec<_>, _>>()?),
    };
    let last = messages.last().and_then(last_text).unwrap_or_default();
    let mut variables = specials.to_vec();
    let given = kwargs(fields)?;
    let has_thinking = given.iter().any(|(name, _)| name == "enable_thinking");
    variables.extend(given);
    if let Some(effort) = &fields.reasoning_effort {
        variables.push(("reasoning_effort".into(), Value::from(effort.as_str())));
        if !has_thinking {
            variables.push(("enable_thinking".into(), Value::from(effort != "none")));
        }
    }
    variables.extend([
        ("messages".into(), Value::from(messages)),
        ("tools".into(), tools),
        ("documents".into(), fields.documents.clone().unwrap_or(Value::from(()))),
        ("add_generation_prompt".into(), Value::from(opens)),
    ]);
    let text = render_template(template, variables, now)?;
    if !continues {
        return Ok(text);
    }
    cut_after(text, &last)
        .ok_or(Failure::Unsupported("continue_final_message of a content not printed"))
}

fn render_as_llama(
    chat: &Chat<'_>,
    template: &Template,
    specials: &[(String, Value)],
    now: Timestamp,
) -> Result<String, Failure> {
    let fields = chat.fields;
    let (messages, prefill) = match chat.messages.split_last() {
        // An answer already begun is always gone on with.
        Some((last, before))
            if last.role.as_deref() == Some("assistant") && last.tool_calls.is_none() =>
        {
            if template.thinks {
                return Err(Failure::Unsupported(
                    "an answer to go on with, of a model that thinks",
                ));
            }
            (before, joined(&content_parts(last)?))
        }
        Some(_) | None => (chat.messages, String::new()),
    };
    let mut values = Vec::with_capacity(messages.len());
    for message in messages {
        values.push(message_for_llama(message, template)?);
    }
    let tools = fields.tools.as_deref().unwrap_or_default();
    let mut variables = specials.to_vec();
    let thinks = fields.reasoning_effort.as_deref() != Some("none");
    variables.push(("enable_thinking".into(), Value::from(thinks)));
    variables.extend(kwargs(fields)?);
    variables.extend([
        ("messages".into(), Value::from(values)),
        (
            "add_generation_prompt".into(),
            Value::from(fields.add_generation_prompt.unwrap_or(true) || !prefill.is_empty()),
        ),
    ]);
    if !tools.is_empty() {
        let tools = tools.iter().map(tool_for_llama).collect::<Result<Vec<_>, _>>()?;
        variables.push(("tools".into(), Value::from(tools)));
    }
    Ok(render_template(template, variables, now)? + &prefill)
}

fn render_template(
    template: &Template,
    variables: Vec<(String, Value)>,
    now: Timestamp,
) -> Result<String, Failure> {
    template.render(variables, now).map_err(|error| Failure::Template(error.to_string()))
}

/// The variables a request gives to its template.
fn kwargs(fields: &Fields) -> Result<Vec<(String, Value)>, Failure> {
    let Some(kwargs) = &fields.chat_template_kwargs else { return Ok(Vec::new()) };
    if kwargs.kind() != ValueKind::Map {
        return Err(Failure::Malformed);
    }
    let mut given = Vec::new();
    for name in kwargs.try_iter().into_iter().flatten() {
        let value = kwargs.get_item(&name).unwrap_or_default();
        let name = name.as_str().unwrap_or_default();
        if TAKEN.contains(&name) {
            return Err(Failure::Unsupported("chat_template_kwargs"));
        }
        given.push((name.to_owned(), value));
    }
    Ok(given)
}

/// The texts of a message, in order.
fn content_parts(message: &Message) -> Result<Vec<Value>, Failure> {
    let Some(content) = &message.content else { return Ok(Vec::new()) };
    if content.kind() == ValueKind::String {
        return Ok(vec![content.clone()]);
    }
    if content.kind() != ValueKind::Seq {
        return Err(Failure::Malformed);
    }
    let mut texts = Vec::new();
    for part in content.try_iter().into_iter().flatten() {
        texts.extend(part_text(&part)?);
    }
    Ok(texts)
}

/// The text of a content part; `None` of one that engines pass over.
fn part_text(part: &Value) -> Result<Option<Value>, Failure> {
    if part.kind() == ValueKind::String {
        return Ok(Some(part.clone()));
    }
    let kind = part.get_attr("type").unwrap_or_default();
    let field = match kind.as_str() {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some(_) => return Err(Failure::Media),
        None => return Err(Failure::Unsupported("a content part without a type")),
    };
    let text = part.get_attr(field).unwrap_or_default();
    if text.is_none() || text.is_undefined() {
        return Ok(None);
    }
    if text.kind() == ValueKind::String { Ok(Some(text)) } else { Err(Failure::Malformed) }
}

fn joined(texts: &[Value]) -> String {
    texts.iter().filter_map(|text| text.as_str()).collect::<Vec<_>>().join("\n")
}

/// Texts as the template takes them.
fn content(texts: Vec<Value>, format: ContentFormat) -> Value {
    match format {
        // The one text of nearly every message is not copied.
        ContentFormat::Text if texts.len() == 1 => texts.into_iter().next().unwrap_or_default(),
        ContentFormat::Text => Value::from(joined(&texts)),
        ContentFormat::Parts => Value::from(texts.into_iter().map(text_part).collect::<Vec<_>>()),
    }
}

fn text_part(text: Value) -> Value {
    Value::from_pairs([("type", Value::from("text")), ("text", text)])
}

fn role(message: &Message) -> Result<&str, Failure> {
    message.role.as_deref().ok_or(Failure::Malformed)
}

fn message_for_vllm(message: &Message, format: ContentFormat) -> Result<Value, Failure> {
    let role = role(message)?;
    // Results of tools are one text, whatever the template is written for.
    let format = if role == "tool" { ContentFormat::Text } else { format };
    let mut pairs =
        vec![("role", Value::from(role)), ("content", content(content_parts(message)?, format))];
    match role {
        "assistant" => {
            if let Some(calls) = message.tool_calls.as_deref().filter(|calls| !calls.is_empty()) {
                pairs.push((
                    "tool_calls",
                    Value::from(calls.iter().map(with_parsed_arguments).collect::<Vec<_>>()),
                ));
            }
            let reasoning = message.reasoning.as_ref().or(message.reasoning_content.as_ref());
            if let Some(reasoning) = reasoning.filter(|reasoning| !reasoning.is_none()) {
                pairs.push(("reasoning", reasoning.clone()));
                pairs.push(("reasoning_content", reasoning.clone()));
            }
        }
        "tool" => pairs.extend(message.tool_call_id.clone().map(|id| ("tool_call_id", id))),
        "developer" => pairs.push(("tools", message.tools.clone().unwrap_or(Value::from(())))),
        _ => {}
    }
    for (key, value) in [("name", &message.name), ("task", &message.task)] {
        if let Some(value) = value.as_ref().filter(|value| value.kind() == ValueKind::String) {
            pairs.push((key, value.clone()));
        }
    }
    Ok(Value::from_pairs(pairs))
}

fn message_for_llama(message: &Message, template: &Template) -> Result<Value, Failure> {
    let role = match role(message)? {
        "developer" if !template.knows_developer => "system",
        role => role,
    };
    let is_text =
        message.content.as_ref().is_some_and(|content| content.kind() == ValueKind::String);
    let format = if is_text { ContentFormat::Text } else { template.content };
    let mut pairs =
        vec![("role", Value::from(role)), ("content", content(content_parts(message)?, format))];
    if let Some(calls) = message.tool_calls.as_deref().filter(|calls| !calls.is_empty()) {
        pairs.push((
            "tool_calls",
            Value::from(calls.iter().map(with_parsed_arguments).collect::<Vec<_>>()),
        ));
    }
    let others = [
        ("reasoning_content", &message.reasoning_content),
        ("name", &message.name),
        ("tool_call_id", &message.tool_call_id),
    ];
    for (key, value) in others {
        if let Some(value) =
            value.as_ref().filter(|value| value.as_str().is_some_and(|text| !text.is_empty()))
        {
            pairs.push((key, value.clone()));
        }
    }
    Ok(Value::from_pairs(pairs))
}

/// A tool call whose arguments are a value and no longer a text, which is what templates print as JSON.
fn with_parsed_arguments(call: &Value) -> Value {
    let function = call.get_attr("function").unwrap_or_default();
    if function.kind() != ValueKind::Map {
        return call.clone();
    }
    let given = function.get_attr("arguments").unwrap_or_default();
    let empty = || Value::from_pairs(std::iter::empty::<(&str, Value)>());
    let arguments = if let Some(text) = given.as_str() {
        serde_json::from_str(text).unwrap_or_else(|_| empty())
    } else if matches!(given.kind(), ValueKind::Map | ValueKind::Seq) {
        given
    } else {
        empty()
    };
    with(call, "function", with(&function, "arguments", arguments))
}

/// A copy of a map with one member set, which stays in its place if it was there.
fn with(map: &Value, name: &str, value: Value) -> Value {
    let mut pairs = Vec::new();
    let mut value = Some(value);
    for key in map.try_iter().into_iter().flatten() {
        let old = map.get_item(&key).unwrap_or_default();
        let member = if key.as_str() == Some(name) { value.take().unwrap_or(old) } else { old };
        pairs.push((key, member));
    }
    pairs.extend(value.map(|value| (Value::from(name), value)));
    Value::from_pairs(pairs)
}

fn tool_for_vllm(tool: &Tool) -> Result<Value, Failure> {
    let function = function(tool)?;
    let known = ["name", "description", "parameters"];
    let mut pairs: Vec<(Value, Value)> = known
        .iter()
        .map(|name| {
            let member = function.get_attr(name).unwrap_or_default();
            (Value::from(*name), if member.is_undefined() { Value::from(()) } else { member })
        })
        .collect();
    for key in function.try_iter().into_iter().flatten() {
        if !key.as_str().is_some_and(|name| known.contains(&name)) {
            let member = function.get_item(&key).unwrap_or_default();
            pairs.push((key, member));
        }
    }
    Ok(Value::from_pairs([
        ("type", Value::from("function")),
        ("function", Value::from_pairs(pairs)),
    ]))
}

fn tool_for_llama(tool: &Tool) -> Result<Value, Failure> {
    let function = function(tool)?;
    let or = |name, absent: Value| {
        let member = function.get_attr(name).unwrap_or_default();
        if member.is_undefined() { absent } else { member }
    };
    let pairs = [
        ("name", or("name", Value::UNDEFINED)),
        ("description", or("description", Value::from(""))),
        ("parameters", or("parameters", Value::from_pairs(std::iter::empty::<(&str, Value)>()))),
    ];
    Ok(Value::from_pairs([
        ("type", Value::from("function")),
        ("function", Value::from_pairs(pairs)),
    ]))
}

fn function(tool: &Tool) -> Result<&Value, Failure> {
    if tool.kind.as_deref().is_some_and(|kind| kind != "function") {
        return Err(Failure::Unsupported("a tool that is no function"));
    }
    tool.function
        .as_ref()
        .filter(|function| function.kind() == ValueKind::Map)
        .ok_or(Failure::Malformed)
}

/// The text of a prepared message that its template prints last.
fn last_text(message: &Value) -> Option<String> {
    let content = message.get_attr("content").ok()?;
    match content.as_str() {
        Some(text) => Some(text.to_owned()),
        None => {
            let last = content.reverse().ok()?.try_iter().ok()?.next()?;
            Some(last.get_attr("text").ok()?.as_str()?.to_owned())
        }
    }
}
