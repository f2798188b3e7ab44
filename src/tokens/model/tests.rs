use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;
use crate::tokens::LocalTokenizers;
use crate::tokens::body::Api;

const TINY: &str = "tests/tokens/tiny";
const EPOCH: Timestamp = Timestamp::UNIX_EPOCH;
const MEGABYTE: usize = 1 << 20;

fn options(dialect: Dialect, template: Option<&str>) -> ModelOptions {
    ModelOptions {
        folder: TINY.into(),
        dialect,
        chat_template: template.map(Into::into),
        content_format: None,
    }
}

fn tokenizers(dialect: Dialect) -> LocalTokenizers {
    let models = BTreeMap::from([
        ("plain".to_owned(), options(dialect, None)),
        ("tools".to_owned(), options(dialect, Some("tests/tokens/tools.jinja"))),
    ]);
    LocalTokenizers::load(&models, MEGABYTE, MEGABYTE).unwrap()
}

/// What a llama.cpp server answered.
#[derive(Debug, Deserialize)]
struct Vector {
    name: String,
    template: String,
    api: String,
    body: String,
    ids: Vec<u32>,
}

#[test]
fn ids_are_those_of_llama_cpp() {
    let vectors: Vec<Vector> =
        serde_json::from_str(include_str!("../../../tests/tokens/vectors.json")).unwrap();
    assert!(vectors.len() > 30);
    let tokenizers = tokenizers(Dialect::LlamaCpp);
    // Twice: from an empty memo, and from what the others left in it.
    for round in 0..2 {
        for vector in &vectors {
            let api = if vector.api == "chat" { Api::Chat } else { Api::Completions };
            let made = tokenizers.tokens(&vector.template, api, vector.body.as_bytes(), EPOCH);
            let name = (&vector.name, &vector.template, round);
            if vector.name == "begun answer" && vector.template == "tools" {
                assert!(made.is_err(), "{name:?}");
            } else {
                assert_eq!(made.as_deref(), Ok(vector.ids.as_slice()), "{name:?}");
            }
        }
    }
    assert!(tokenizers.memo_use().entries > 3);
}

#[test]
fn dialects_agree_where_nothing_is_special() {
    let vectors: Vec<Vector> =
        serde_json::from_str(include_str!("../../../tests/tokens/vectors.json")).unwrap();
    let tokenizers = tokenizers(Dialect::Vllm);
    let differs = ["begun answer", "developer", "tools", "tools forbidden", "tool turn"];
    for vector in vectors.iter().filter(|vector| !differs.contains(&vector.name.as_str())) {
        let api = if vector.api == "chat" { Api::Chat } else { Api::Completions };
        let made = tokenizers.tokens(&vector.template, api, vector.body.as_bytes(), EPOCH);
        assert_eq!(
            made.as_deref(),
            Ok(vector.ids.as_slice()),
            "{} {}",
            vector.name,
            vector.template
        );
    }
}

/// The tiny tokenizer with parts of its file replaced.
fn tiny_with(changes: &[(&str, Json)], added: &[Json]) -> Model {
    let text = fs::read_to_string(format!("{TINY}/tokenizer.json")).unwrap();
    let mut file: Json = serde_json::from_str(&text).unwrap();
    for (name, value) in changes {
        file[*name] = value.clone();
    }
    file["added_tokens"].as_array_mut().unwrap().extend(added.iter().cloned());
    let tokenizer = Tokenizer::from_bytes(serde_json::to_vec(&file).unwrap()).unwrap();
    let cuts = Cuts::new(&tokenizer).unwrap();
    let around = around(&tokenizer);
    Model {
        number: 0,
        tokenizer,
        cuts,
        around,
        template: None,
        tool_template: None,
        specials: Vec::new(),
        dialect: Dialect::Vllm,
    }
}

fn token(id: u32, content: &str, flags: &[&str]) -> Json {
    let has = |flag| flags.contains(&flag);
    json!({
        "id": id, "content": content, "special": !has("plain"), "single_word": has("single_word"),
        "lstrip": has("lstrip"), "rstrip": has("rstrip"), "normalized": has("normalized"),
    })
}

/// Tokenizers with all the rules that look over the edge of a piece.
fn kinds() -> Vec<Model> {
    let bos = json!({
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    });
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": scheme, "split": true});
    let prefix = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let normalizer = json!({"type": "Sequence", "normalizers": [
        {"type": "NFKC"}, {"type": "Prepend", "prepend": "_"}, {"type": "Replace", "pattern": {"String": "  "}, "content": "="},
    ]});
    let strips = [
        token(2048, "<l>", &["lstrip"]),
        token(2049, "<r>", &["rstrip"]),
        token(2050, "<|im_end|>\n", &[]),
        token(2051, "word", &["single_word"]),
        token(2052, "<n>", &["normalized"]),
        token(2053, " two ", &["plain"]),
    ];
    vec![
        tiny_with(&[], &[]),
        tiny_with(&[("post_processor", bos.clone())], &strips),
        tiny_with(&[("pre_tokenizer", metaspace("first"))], &strips),
        tiny_with(&[("pre_tokenizer", metaspace("always"))], &strips),
        tiny_with(&[("pre_tokenizer", prefix)], &strips),
        tiny_with(&[("normalizer", normalizer), ("post_processor", bos)], &strips),
    ]
}

fn text() -> impl Strategy<Value = String> {
    let marks = [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>\n",
        "<|endoftext|>",
        "<l>",
        "<r>",
        "<n>",
        "word",
        " two ",
        " ",
        "  ",
        "\n",
        "\n\n",
        "<|im_",
        "end|>",
        "<",
        "s",
        "'s",
        "=",
        "ﬁ",
    ];
    let long = "The clerk kept the record of the bridge, the mill and the market. ".repeat(5);
    let part = prop_oneof![
        6 => proptest::sample::select(marks.to_vec()).prop_map(str::to_owned),
        3 => "[a-zA-Z0-9 ,.é🙂\n]{0,12}",
        2 => Just(long),
        1 => any::<String>(),
    ];
    proptest::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Tokenizing in pieces gives what tokenizing whole gives, whatever the memo holds.
    #[test]
    fn pieces_are_the_whole(texts in proptest::collection::vec(text(), 1..4), grow in text(), add in any::<bool>()) {
        for model in KINDS.with(Arc::clone).iter() {
            let memo = Mutex::new(Memo::new(64 << 10));
            let mut talk = String::new();
            for text in texts.iter().chain([&grow]) {
                talk.push_str(text);
                let whole = model.encode_whole(&talk, add).unwrap();
                let cut = model.encode(&talk, add, &memo).unwrap();
                prop_assert_eq!(&whole, cut.as_ref());
                let again = model.encode(&talk, add, &memo).unwrap();
                prop_assert_eq!(&whole, again.as_ref());
            }
        }
    }

    #[test]
    fn no_body_panics(body in any::<String>(), prompt in any::<String>()) {
        let tokenizers = TOKENIZERS.with(Arc::clone);
        for api in [Api::Chat, Api::Completions, Api::Responses] {
            let _either = tokenizers.tokens("plain", api, body.as_bytes(), EPOCH);
            let body = json!({"prompt": prompt, "input": prompt, "messages": [{"role": prompt, "content": prompt}]});
            let made = tokenizers.tokens("tools", api, body.to_string().as_bytes(), EPOCH);
            prop_assert!(!matches!(made, Err(Failure::Panicked)));
        }
    }
}

thread_local! {
    static KINDS: Arc<Vec<Model>> = Arc::new(kinds());
    static TOKENIZERS: Arc<LocalTokenizers> = Arc::new(tokenizers(Dialect::Vllm));
}

#[test]
fn a_new_turn_adds_one_piece() {
    let model = tiny_with(&[], &[]);
    let memo = Mutex::new(Memo::new(MEGABYTE));
    let turn = |n: usize| {
        format!("<|im_start|>user\n{}{n}<|im_end|>\n", "Who kept the bridge? ".repeat(20))
    };
    let mut talk = String::new();
    for n in 0..10 {
        talk.push_str(&turn(n));
        model.encode(&talk, false, &memo).unwrap();
        assert_eq!(memo.lock().unwrap().len(), n + 1);
    }
}

#[test]
fn ids_that_are_given_stay() {
    let tokenizers = tokenizers(Dialect::Vllm);
    for body in [r#"{"prompt":[5,6,70000]}"#, r#"{"prompt":[[5,6,70000]]}"#] {
        let made = tokenizers.tokens("plain", Api::Completions, body.as_bytes(), EPOCH);
        assert_eq!(made.as_deref(), Ok([5, 6, 70000].as_slice()));
    }
}

#[test]
fn what_is_not_sure_is_a_failure() {
    let tokenizers = tokenizers(Dialect::Vllm);
    let user = r#""messages":[{"role":"user","content":"x"}]"#;
    let cases = [
        (Api::Chat, "{".to_owned(), Failure::Malformed),
        (Api::Chat, "{}".to_owned(), Failure::NoPrompt),
        (Api::Chat, r#"{"messages":[]}"#.to_owned(), Failure::NoPrompt),
        (Api::Chat, r#"{"messages":[{"content":"no role"}]}"#.to_owned(), Failure::Malformed),
        (Api::Chat, format!(r#"{{{user},"chat_template":"x"}}"#), Failure::Unsupported("chat_template")),
        (
            Api::Chat,
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}"#.to_owned(),
            Failure::Media,
        ),
        (Api::Chat, format!(r#"{{{user},"truncate_prompt_tokens":9}}"#), Failure::Unsupported("truncate_prompt_tokens")),
        (Api::Completions, r#"{"prompt":["a","b"]}"#.to_owned(), Failure::Batch),
        (Api::Completions, r#"{"prompt":[]}"#.to_owned(), Failure::NoPrompt),
        (Api::Completions, format!(r#"{{"prompt":"{}"}}"#, "x".repeat(MEGABYTE + 1)), Failure::TooLarge),
        (Api::Responses, r#"{"input":"x","previous_response_id":"r"}"#.to_owned(), Failure::Unsupported("previous_response_id")),
        (
            Api::Responses,
            r#"{"input":[{"type":"function_call","name":"f"}]}"#.to_owned(),
            Failure::Unsupported("items of the responses API"),
        ),
    ];
    for (api, body, failure) in cases {
        assert_eq!(
            tokenizers.tokens("plain", api, body.as_bytes(), EPOCH),
            Err(failure),
            "{body:.80}"
        );
    }
    assert_eq!(tokenizers.tokens("other", Api::Chat, b"{}", EPOCH), Err(Failure::NoTokenizer));
}

#[test]
fn the_responses_api_is_a_chat() {
    let tokenizers = tokenizers(Dialect::Vllm);
    let chat = r#"{"messages":[{"role":"system","content":"s"},{"role":"user","content":"x"}]}"#;
    let chat = tokenizers.tokens("plain", Api::Chat, chat.as_bytes(), EPOCH).unwrap();
    let bodies = [
        r#"{"instructions":"s","input":"x"}"#,
        r#"{"instructions":"s","input":[{"type":"message","role":"user","content":[{"type":"input_text","text":"x"}]}]}"#,
    ];
    for body in bodies {
        assert_eq!(
            tokenizers.tokens("plain", Api::Responses, body.as_bytes(), EPOCH).as_ref(),
            Ok(&chat)
        );
    }
}

#[test]
fn strange_texts_do_not_stop_it() {
    let model = tiny_with(&[], &[]);
    let texts = [
        " ".repeat(20_000),
        "\n \t".repeat(10_000),
        "a".repeat(20_000),
        "\u{0}".repeat(1000),
        "\u{10ffff}\u{feff}\u{200d}".repeat(1000),
        "<|im_start|>".repeat(20_000),
        "<|im_start|".repeat(20_000),
    ];
    for text in &texts {
        let memo = Mutex::new(Memo::new(MEGABYTE));
        let whole = model.encode_whole(text, false).unwrap();
        assert_eq!(whole.as_slice(), model.encode(text, false, &memo).unwrap().as_ref());
        assert_eq!(model.tokenizer.decode(&whole, false).unwrap(), *text);
    }
}

#[test]
fn a_folder_that_is_no_model_says_so() {
    let mut missing = options(Dialect::Vllm, None);
    missing.folder = "tests/tokens".into();
    assert!(matches!(Model::load(0, &missing), Err(LoadError::Read { .. })));
    let broken = options(Dialect::Vllm, Some("tests/tokens/vectors.json"));
    assert!(Model::load(0, &broken).is_ok(), "any text is a template");
}
