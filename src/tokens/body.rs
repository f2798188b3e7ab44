//! The parts of a request body that its prompt is made of.

use minijinja::Value;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::Failure;
use super::chat::Chat;

/// The API a request is for; it decides which fields hold the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Api {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`, and llama.cpp's `/completion`.
    Completions,
    /// `/v1/responses`.
    Responses,
}

impl Api {
    /// Returns the API behind a path, which may have a query; `None` if its prompts are not known here.
    #[must_use]
    pub fn of(path: &str) -> Option<Self> {
        let path = path.split('?').next().unwrap_or_default().trim_end_matches('/');
        let mut segments = path.rsplit('/');
        match (segments.next(), segments.next()) {
            (Some("completions"), Some("chat")) => Some(Self::Chat),
            (Some("completions" | "completion"), _) => Some(Self::Completions),
            (Some("responses"), _) => Some(Self::Responses),
            _ => None,
        }
    }
}

/// A request body, read for its prompt.
#[derive(Debug)]
pub(crate) struct Body {
    api: Api,
    fields: Fields,
    pub(crate) add_special_tokens: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Fields {
    pub(crate) messages: Option<Vec<Message>>,
    prompt: Option<Prompt>,
    input: Option<Input>,
    instructions: Option<String>,
    pub(crate) tools: Option<Vec<Tool>>,
    chat_template: Option<IgnoredAny>,
    pub(crate) chat_template_kwargs: Option<Value>,
    pub(crate) add_generation_prompt: Option<bool>,
    pub(crate) continue_final_message: Option<bool>,
    pub(crate) documents: Option<Value>,
    pub(crate) reasoning_effort: Option<String>,
    reasoning: Option<IgnoredAny>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<IgnoredAny>,
    prompt_embeds: Option<IgnoredAny>,
    previous_response_id: Option<IgnoredAny>,
    conversation: Option<IgnoredAny>,
    suffix: Option<IgnoredAny>,
}

/// One message of a chat, as the client wrote it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Message {
    #[serde(rename = "type")]
    kind: Option<String>,
    pub(crate) role: Option<String>,
    pub(crate) content: Option<Value>,
    pub(crate) name: Option<Value>,
    pub(crate) tool_calls: Option<Vec<Value>>,
    pub(crate) tool_call_id: Option<Value>,
    pub(crate) reasoning: Option<Value>,
    pub(crate) reasoning_content: Option<Value>,
    pub(crate) task: Option<Value>,
    pub(crate) tools: Option<Value>,
}

/// A tool of a chat request.
#[derive(Debug, Deserialize)]
pub(crate) struct Tool {
    #[serde(rename = "type")]
    pub(crate) kind: Option<String>,
    pub(crate) function: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompt {
    Text(String),
    Ids(Vec<u32>),
    Texts(Vec<String>),
    ManyIds(Vec<Vec<u32>>),
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Message>),
}

/// What is to be tokenized.
#[derive(Debug)]
pub(crate) enum Ask<'b> {
    /// Nothing: the client did it.
    Ids(&'b [u32]),
    Text(&'b str),
    Chat(Chat<'b>),
}

impl Body {
    /// Reads a body.
    ///
    /// # Errors
    /// If it is not a JSON object of the types that the API has.
    pub(crate) fn read(api: Api, body: &[u8]) -> Result<Self, Failure> {
        let mut fields: Fields =
            serde_json::from_slice(body).map_err(|_unused| Failure::Malformed)?;
        if let (Api::Responses, Some(Input::Items(items))) = (api, &mut fields.input) {
            fields.messages = Some(std::mem::take(items));
        }
        if let (Api::Responses, Some(Input::Text(text))) = (api, &fields.input) {
            let content = Some(Value::from(text.as_str()));
            fields.messages =
                Some(vec![Message { role: Some("user".into()), content, ..Message::default() }]);
        }
        if let (Api::Responses, Some(instructions), Some(messages)) =
            (api, &fields.instructions, &mut fields.messages)
        {
            let content = Some(Value::from(instructions.as_str()));
            messages
                .insert(0, Message { role: Some("system".into()), content, ..Message::default() });
        }
        let add_special_tokens = fields.add_special_tokens;
        Ok(Self { api, fields, add_special_tokens })
    }

    /// Returns the ids the client gave in place of a text.
    pub(crate) fn given(&self) -> Option<&[u32]> {
        match self.ask() {
            Ok(Ask::Ids(ids)) => Some(ids),
            Ok(Ask::Text(_) | Ask::Chat(_)) | Err(_) => None,
        }
    }

    /// Returns the text of a completion; `None` of a chat.
    ///
    /// # Errors
    /// As [`Self::ask`], and for ids in place of a text.
    pub(crate) fn text(&self) -> Result<Option<&str>, Failure> {
        match self.ask()? {
            Ask::Text(text) => Ok(Some(text)),
            Ask::Chat(_) => Ok(None),
            Ask::Ids(_) => Err(Failure::NoPrompt),
        }
    }

    /// Whether nothing is asked for that vLLM's `/tokenize` does not know of.
    pub(crate) fn is_plain(&self) -> bool {
        self.fields.reasoning_effort.is_none() && self.fields.documents.is_none()
    }

    /// Returns what is to be tokenized.
    ///
    /// # Errors
    /// If the body asks for something that only the engine can make a prompt of.
    pub(crate) fn ask(&self) -> Result<Ask<'_>, Failure> {
        let fields = &self.fields;
        if fields.truncate_prompt_tokens.is_some() {
            return Err(Failure::Unsupported("truncate_prompt_tokens"));
        }
        match self.api {
            Api::Completions => self.completion(),
            Api::Chat => self.chat(),
            Api::Responses => {
                let engine_state = [
                    (fields.previous_response_id.is_some(), "previous_response_id"),
                    (fields.conversation.is_some(), "conversation"),
                    (fields.reasoning.is_some(), "reasoning"),
                    (
                        fields.tools.as_ref().is_some_and(|tools| !tools.is_empty()),
                        "tools of the responses API",
                    ),
                ];
                if let Some((_, what)) = engine_state.iter().find(|(is_there, _)| *is_there) {
                    return Err(Failure::Unsupported(what));
                }
                let items = fields.messages.as_deref().unwrap_or_default();
                if items
                    .iter()
                    .any(|item| item.kind.as_deref().is_some_and(|kind| kind != "message"))
                {
                    return Err(Failure::Unsupported("items of the responses API"));
                }
                self.chat()
            }
        }
    }

    fn completion(&self) -> Result<Ask<'_>, Failure> {
        if self.fields.prompt_embeds.is_some() {
            return Err(Failure::Media);
        }
        if self.fields.suffix.is_some() {
            return Err(Failure::Unsupported("suffix"));
        }
        match &self.fields.prompt {
            Some(Prompt::Text(text)) => Ok(Ask::Text(text)),
            Some(Prompt::Ids(ids)) if !ids.is_empty() => Ok(Ask::Ids(ids)),
            Some(Prompt::Texts(texts)) => match texts.as_slice() {
                [text] => Ok(Ask::Text(text)),
                _ => Err(Failure::Batch),
            },
            Some(Prompt::ManyIds(many)) => match many.as_slice() {
                [ids] => Ok(Ask::Ids(ids)),
                _ => Err(Failure::Batch),
            },
            Some(Prompt::Ids(_)) | None => Err(Failure::NoPrompt),
        }
    }

    fn chat(&self) -> Result<Ask<'_>, Failure> {
        if self.fields.chat_template.is_some() {
            return Err(Failure::Unsupported("chat_template"));
        }
        match self.fields.messages.as_deref() {
            None | Some([]) => Err(Failure::NoPrompt),
            Some(messages) => Ok(Ask::Chat(Chat { messages, fields: &self.fields })),
        }
    }
}
