use proptest::prelude::*;
use serde_json::{Map, Value};

use super::*;

/// Builds the whole document: what the readers never do, and what shows every event.
#[derive(Debug, Default)]
struct Builder {
    open: Vec<(Value, String)>,
    name: String,
    text: Vec<u8>,
    done: Option<Value>,
    longest_name: usize,
}

impl Builder {
    fn add(&mut self, value: Value) {
        match self.open.last_mut() {
            None => self.done = Some(value),
            Some((Value::Array(values), _)) => values.push(value),
            Some((Value::Object(members), _)) => {
                members.insert(self.name.clone(), value);
            }
            Some((other, _)) => panic!("{other} is no container"),
        }
    }
}

impl Visitor for Builder {
    type Place = ();

    fn member(&mut self, (): (), name: &[u8]) {
        self.name = String::from_utf8_lossy(name).into_owned();
        self.longest_name = self.longest_name.max(name.len());
    }

    fn element(&mut self, (): ()) {}

    fn begin(&mut self, (): (), kind: Kind) {
        let value = match kind {
            Kind::Object => Value::Object(Map::new()),
            Kind::Array => Value::Array(Vec::new()),
        };
        self.open.push((value, self.name.clone()));
    }

    fn end(&mut self, (): (), _kind: Kind) {
        let (value, name) = self.open.pop().unwrap();
        self.name = name;
        self.add(value);
    }

    fn text(&mut self, (): (), piece: &[u8]) {
        assert!(!piece.is_empty());
        self.text.extend_from_slice(piece);
    }

    fn text_end(&mut self, (): ()) {
        let text = String::from_utf8_lossy(&self.text).into_owned();
        self.text.clear();
        self.add(Value::String(text));
    }

    fn scalar(&mut self, (): (), token: &[u8]) {
        let word = String::from_utf8_lossy(token).into_owned();
        let value = serde_json::from_slice(token).unwrap_or(Value::String(word));
        self.add(value);
    }
}

fn build(chunks: &[&[u8]]) -> (Status, Builder) {
    let mut tokenizer = Tokenizer::new(());
    let mut builder = Builder::default();
    for chunk in chunks {
        tokenizer.push(chunk, &mut builder);
    }
    (tokenizer.status(), builder)
}

#[track_caller]
fn check(document: impl AsRef<[u8]>, status: Status, value: Option<Value>) {
    let document = document.as_ref();
    let (seen, builder) = build(&[document]);
    assert_eq!((seen, builder.done), (status, value.clone()), "in one chunk");
    let bytes: Vec<&[u8]> = document.chunks(1).collect();
    let (seen, builder) = build(&bytes);
    assert_eq!((seen, builder.done), (status, value), "byte by byte");
}

#[test]
fn a_document_is_read_whatever_its_form() {
    use serde_json::json;
    check("{}", Status::Complete, Some(json!({})));
    check(" [ ] \n\t\r", Status::Complete, Some(json!([])));
    check(r#""x""#, Status::Complete, Some(json!("x")));
    check("12 ", Status::Complete, Some(json!(12)));
    check(
        r#"{"a":[1,{"b":null},"c"],"d":true}"#,
        Status::Complete,
        Some(json!({"a": [1, {"b": null}, "c"], "d": true})),
    );
    check(b"\xef\xbb\xbf{\"a\":1}", Status::Complete, Some(json!({"a": 1})));
    check(
        r#"{"mod\u0065l":"\"\\\/\b\f\n\r\t"}"#,
        Status::Complete,
        Some(json!({"model": "\"\\/\u{8}\u{c}\n\r\t"})),
    );
    check(
        "[NaN,Infinity,-Infinity]",
        Status::Complete,
        Some(json!(["NaN", "Infinity", "-Infinity"])),
    );
}

#[test]
fn a_broken_document_is_malformed_and_a_short_one_is_not() {
    use serde_json::json;
    for document in ["", " ", "{", "[1", "[1,", r#"{"a"#, r#"{"a":"\ud8"#, "\u{feff}"] {
        check(document, Status::Running, None);
    }
    for document in [
        "{,",
        "[,",
        "[1 2",
        "[}",
        "{]",
        "{1",
        "{\"a\",",
        "{\"a\":1,}",
        "{'a':1}",
        "// c",
        "\"\\q",
        "\"\\u00g0",
        "\u{fffe}",
        "]",
        "}",
        ":",
        "\0",
        "[\"a\"\"b\"",
        "{\"a\"::",
    ] {
        check(document, Status::Malformed, None);
    }
    for document in ["{}{}", "{}garbage", "{}}", "{}\0"] {
        check(document, Status::Malformed, Some(json!({})));
    }
}

#[test]
fn escapes_decode_to_the_same_bytes_however_they_are_cut() {
    let cases: &[(&str, &[u8])] = &[
        (r"\u0041", b"A"),
        (r"\u00e9", "é".as_bytes()),
        (r"\u4F60", "你".as_bytes()),
        (r"\ud83e\udd80", "🦀".as_bytes()),
        (r"\ud83d", b"\xed\xa0\xbd"),
        (r"x \ude00 y", b"x \xed\xb8\x80 y"),
        (r"\ud83d\ud83d\ude00", b"\xed\xa0\xbd\xf0\x9f\x98\x80"),
        (r"\ud83d\n\ude00", b"\xed\xa0\xbd\n\xed\xb8\x80"),
        (r"\ud83dx", b"\xed\xa0\xbdx"),
        (r"\u0000", b"\0"),
    ];
    for (text, decoded) in cases {
        let document = format!("\"{text}\"");
        for chunk in 1..=document.len() {
            let mut tokenizer = Tokenizer::new(());
            let mut seen = Pieces::default();
            for piece in document.as_bytes().chunks(chunk) {
                tokenizer.push(piece, &mut seen);
            }
            assert_eq!(&seen.0, decoded, "{text} in chunks of {chunk}");
        }
    }
}

#[derive(Default)]
struct Pieces(Vec<u8>);

impl Visitor for Pieces {
    type Place = ();
    fn member(&mut self, (): (), _name: &[u8]) {}
    fn element(&mut self, (): ()) {}
    fn begin(&mut self, (): (), _kind: Kind) {}
    fn end(&mut self, (): (), _kind: Kind) {}
    fn text(&mut self, (): (), piece: &[u8]) {
        self.0.extend_from_slice(piece);
    }
    fn text_end(&mut self, (): ()) {}
    fn scalar(&mut self, (): (), _token: &[u8]) {}
}

#[test]
fn depth_costs_nothing_and_the_rest_is_still_read() {
    for depth in [127, 128, 129, 1_000, 200_000] {
        let deep = format!(r#"{}"]\"}}"{}"#, "[".repeat(depth), "]".repeat(depth));
        let (status, builder) = build(&[format!(r#"{{"deep":{deep},"after":1}}"#).as_bytes()]);
        assert_eq!(status, Status::Complete, "{depth} levels");
        assert_eq!(builder.done.unwrap()["after"], 1, "{depth} levels");
        assert!(builder.open.capacity() <= 256);
    }
    let (status, builder) = build(&["{\"a\":".repeat(100_000).as_bytes()]);
    assert_eq!((status, builder.open.len()), (Status::Running, VISIBLE_DEPTH));
}

#[test]
fn long_names_and_words_are_cut() {
    let long = "n".repeat(1000);
    for document in [format!(r#"{{"{long}":{long}}}"#), format!(r#"{{"\u006e{long}":{long}}}"#)] {
        let (status, builder) = build(&[document.as_bytes()]);
        assert_eq!((status, builder.longest_name), (Status::Complete, HELD_BYTES));
        assert_eq!(builder.done.unwrap()[&long[..HELD_BYTES]], long[..HELD_BYTES]);
    }
}

#[test]
fn a_count_is_digits_and_nothing_else() {
    let cases: &[(&str, Option<u64>)] = &[
        ("0", Some(0)),
        ("18446744073709551615", Some(u64::MAX)),
        ("18446744073709551616", None),
        ("-5", None),
        ("+5", None),
        ("1e300", None),
        ("1.0", None),
        ("null", None),
        ("", None),
    ];
    for (token, expected) in cases {
        assert_eq!(count(token.as_bytes()), *expected, "{token}");
    }
}

#[test]
fn a_string_over_its_limit_is_not_kept() {
    let mut kept = Kept::default();
    for piece in [b"abc".as_slice(), b"de", b"f"] {
        kept.push(piece, 4);
    }
    assert_eq!((kept.get(), kept.to_text()), (None, None));
    kept.clear();
    kept.push(b"abcd", 4);
    assert_eq!(kept.to_text().as_deref(), Some("abcd"));
}

fn json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        ".{0,20}".prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 40, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::vec((".{0,12}", inner), 0..6)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

/// Writes every character outside ASCII as escapes, as some clients do.
fn escaped(document: &str) -> String {
    let escape = |character: char| {
        let units: Vec<u16> = character.encode_utf16(&mut [0; 2]).to_vec();
        units.iter().map(|unit| format!("\\u{unit:04x}")).collect::<String>()
    };
    let each = |character: char| {
        if character.is_ascii() { character.to_string() } else { escape(character) }
    };
    document.chars().map(each).collect()
}

proptest! {
    #[test]
    fn a_document_reads_as_another_parser_reads_it(value in json(), pretty: bool, escape: bool, chunk in 1_usize..40) {
        let mut document = if pretty { serde_json::to_string_pretty(&value) } else { serde_json::to_string(&value) }.unwrap();
        if escape {
            document = escaped(&document);
        }
        document.push('\n');
        let chunks: Vec<&[u8]> = document.as_bytes().chunks(chunk).collect();
        let (status, builder) = build(&chunks);
        prop_assert_eq!(status, Status::Complete);
        prop_assert_eq!(builder.done, Some(value));
    }

    #[test]
    fn what_another_parser_accepts_is_never_malformed(document in r#"[\[\]{}:,"a1 \\u]{0,12}"#) {
        let accepted = serde_json::from_str::<Value>(&document).is_ok();
        let (status, _) = build(&[document.as_bytes(), b" "]);
        prop_assert!(!accepted || status == Status::Complete, "{document}: {status:?}");
    }

    #[test]
    fn any_bytes_give_the_same_in_any_chunks(bytes: Vec<u8>, text in r#"[\[\]{}:,"a1 \\u]{0,30}"#, chunk in 1_usize..9) {
        for document in [&bytes, text.as_bytes()] {
            let (whole, one) = build(&[document]);
            let chunks: Vec<&[u8]> = document.chunks(chunk).collect();
            let (cut, many) = build(&chunks);
            prop_assert_eq!((whole, one.done, one.open), (cut, many.done, many.open));
        }
    }
}
