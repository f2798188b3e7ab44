//! Values as Python prints them: chat templates are written for its `str`, `repr` and `json.dumps`.

use std::fmt::Write;

use minijinja::value::{Value, ValueKind};

/// How an engine prints a number with a fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Floats {
    /// As Python's `repr`: the fewest digits that read back the same, and always a sign of being a float.
    Python,
    /// As C's `%g`: six digits, and none that say nothing.
    C,
}

/// What `json.dumps` can be told.
#[derive(Debug)]
pub(crate) struct Layout {
    /// Spaces a level; without it all is on one line.
    pub(crate) indent: Option<usize>,
    pub(crate) item: String,
    pub(crate) key: String,
    pub(crate) sort_keys: bool,
    pub(crate) ensure_ascii: bool,
    pub(crate) floats: Floats,
}

impl Layout {
    /// The layout of a plain `json.dumps(value, ensure_ascii=False, indent=indent)`.
    pub(crate) fn plain(indent: Option<usize>, floats: Floats) -> Self {
        let item = if indent.is_some() { "," } else { ", " };
        Self {
            indent,
            item: item.into(),
            key: ": ".into(),
            sort_keys: false,
            ensure_ascii: false,
            floats,
        }
    }
}

/// A value has no place in JSON, such as an undefined one.
#[derive(Debug)]
pub(crate) struct NoJson(pub(crate) ValueKind);

/// Returns `value` as `json.dumps` writes it.
///
/// # Errors
/// If there is something in it that JSON has not.
pub(crate) fn json(value: &Value, layout: &Layout) -> Result<String, NoJson> {
    let mut out = String::new();
    write_json(&mut out, value, layout, 0)?;
    Ok(out)
}

fn write_json(
    out: &mut String,
    value: &Value,
    layout: &Layout,
    depth: usize,
) -> Result<(), NoJson> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => number(out, value, layout.floats),
        ValueKind::String => {
            quote_json(out, value.as_str().unwrap_or_default(), layout.ensure_ascii);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items = value.try_iter().map_err(|_unused| NoJson(value.kind()))?;
            let mut any = false;
            out.push('[');
            for item in items {
                separate(out, &mut any, layout, depth);
                write_json(out, &item, layout, depth + 1)?;
            }
            close(out, any, layout, depth, ']');
        }
        ValueKind::Map => {
            let keys = value.try_iter().map_err(|_unused| NoJson(value.kind()))?;
            let mut keys: Vec<Value> = keys.collect();
            if layout.sort_keys {
                keys.sort();
            }
            let mut any = false;
            out.push('{');
            for key in keys {
                separate(out, &mut any, layout, depth);
                match key.as_str() {
                    Some(name) => quote_json(out, name, layout.ensure_ascii),
                    // Numbers and literals are keys in Python and strings in JSON.
                    None => {
                        out.push('"');
                        write_json(out, &key, layout, depth + 1)?;
                        out.push('"');
                    }
                }
                out.push_str(&layout.key);
                let item = value.get_item(&key).map_err(|_unused| NoJson(value.kind()))?;
                write_json(out, &item, layout, depth + 1)?;
            }
            close(out, any, layout, depth, '}');
        }
        ValueKind::Undefined | ValueKind::Bytes | ValueKind::Plain | ValueKind::Invalid | _ => {
            return Err(NoJson(value.kind()));
        }
    }
    Ok(())
}

fn separate(out: &mut String, any: &mut bool, layout: &Layout, depth: usize) {
    if *any {
        out.push_str(&layout.item);
    }
    *any = true;
    new_line(out, layout, depth + 1);
}

fn close(out: &mut String, any: bool, layout: &Layout, depth: usize, end: char) {
    if any {
        new_line(out, layout, depth);
    }
    out.push(end);
}

fn new_line(out: &mut String, layout: &Layout, depth: usize) {
    if let Some(indent) = layout.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * depth));
    }
}

fn quote_json(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            '\0'..='\u{1f}' => escape(out, u32::from(character)),
            '\u{7f}'.. if ensure_ascii && !character.is_ascii() => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    escape(out, u32::from(*unit));
                }
            }
            _ => out.push(character),
        }
    }
    out.push('"');
}

fn escape(out: &mut String, unit: u32) {
    // Writing to a string cannot fail.
    _ = write!(out, "\\u{unit:04x}");
}

fn number(out: &mut String, value: &Value, floats: Floats) {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => out.push_str(&match floats {
            Floats::Python => repr(float),
            Floats::C => general(float),
        }),
        _ => _ = write!(out, "{value}"),
    }
}

/// Python's `repr` of a float.
fn repr(float: f64) -> String {
    if float.is_nan() {
        return "NaN".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    lay_out(&format!("{float:e}"), 16, true)
}

/// C's `%g` of a float.
fn general(float: f64) -> String {
    if !float.is_finite() {
        return "null".into();
    }
    lay_out(&format!("{float:.5e}"), 6, false)
}

/// Turns the scientific form of a float into what Python and C make of it: an exponent only for very small numbers,
/// or for those of more than `digits` digits.
fn lay_out(scientific: &str, digits: i32, point: bool) -> String {
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    let all: String = mantissa.chars().filter(|character| *character != '.').collect();
    let figures = all.trim_end_matches('0');
    let figures = if figures.is_empty() { "0" } else { figures };
    if exponent < -4 || exponent >= digits {
        let (first, rest) = figures.split_at(1);
        let dot = if rest.is_empty() { "" } else { "." };
        let minus = if exponent < 0 { '-' } else { '+' };
        return format!("{sign}{first}{dot}{rest}e{minus}{:02}", exponent.abs());
    }
    let whole = usize::try_from(exponent + 1).unwrap_or(0);
    if whole == 0 {
        let zeros = "0".repeat(usize::try_from(-exponent - 1).unwrap_or(0));
        return format!("{sign}0.{zeros}{figures}");
    }
    if figures.len() <= whole {
        let zeros = "0".repeat(whole - figures.len());
        return format!("{sign}{figures}{zeros}{}", if point { ".0" } else { "" });
    }
    let (before, after) = figures.split_at(whole);
    format!("{sign}{before}.{after}")
}

/// Returns `value` as Python's `str` has it, which is what `{{ value }}` prints.
pub(crate) fn text(value: &Value, floats: Floats) -> String {
    if let Some(text) = value.as_str() {
        return text.to_owned();
    }
    let mut out = String::new();
    write_repr(&mut out, value, floats);
    out
}

fn write_repr(out: &mut String, value: &Value, floats: Floats) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => number(out, value, floats),
        ValueKind::String => quote_python(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &item, floats);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index == 0 { "" } else { ", " });
                write_repr(out, &key, floats);
                out.push_str(": ");
                write_repr(out, &value.get_item(&key).unwrap_or_default(), floats);
            }
            out.push('}');
        }
        ValueKind::Undefined => {}
        ValueKind::Bytes | ValueKind::Iterable | ValueKind::Plain | ValueKind::Invalid | _ => {
            _ = write!(out, "{value}");
        }
    }
}

fn quote_python(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for character in text.chars() {
        match character {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\0'..='\u{1f}' | '\u{7f}' => _ = write!(out, "\\x{:02x}", u32::from(character)),
            _ if character == quote => {
                out.push('\\');
                out.push(character);
            }
            _ => out.push(character),
        }
    }
    out.push(quote);
}
