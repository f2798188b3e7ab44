use super::*;

fn render(source: &str, variables: &str) -> String {
    try_render(source, variables).unwrap()
}

fn try_render(source: &str, variables: &str) -> Result<String, Error> {
    let variables: Value = serde_json::from_str(variables).unwrap();
    let pairs = variables.try_iter().unwrap().map(|key| {
        let value = variables.get_item(&key).unwrap();
        (key.as_str().unwrap().to_owned(), value)
    });
    let now = "2026-03-09T08:05:00Z".parse().unwrap();
    Template::new(source, Floats::Python).unwrap().render(pairs.collect(), now)
}

#[test]
fn values_print_as_in_python() {
    let v = r#"{"v":{"b":[1,2.0,1e16,1e15,0.00001,null,true,"é\"\n</x>\u0001"],"a":{}},"n":null,"f":1.5}"#;
    assert_eq!(
        render("{{ v | tojson }}", v),
        r#"{"b": [1, 2.0, 1e+16, 1000000000000000.0, 1e-05, null, true, "é\"\n</x>\u0001"], "a": {}}"#
    );
    assert_eq!(
        render("{{ v.a | tojson(indent=2) }}{{ [1] | tojson(indent=2) }}", v),
        "{}[\n  1\n]"
    );
    assert_eq!(
        render("{{ v | tojson(sort_keys=true, separators=(',', ':')) }}", v).get(..7),
        Some(r#"{"a":{}"#)
    );
    assert_eq!(render("{{ 'é🙂' | tojson(ensure_ascii=true) }}", v), r#""\u00e9\ud83d\ude42""#);
    assert_eq!(
        render("{{ n }} {{ true }} {{ f }} {{ ['a', none, \"it's\"] }}", v),
        "None True 1.5 ['a', None, \"it's\"]"
    );
}

#[test]
fn templates_have_what_they_use() {
    let v = r#"{"messages":[{"role":"user","content":" a</think>b "},{"role":"x","content":"y"}]}"#;
    assert_eq!(render("{%- for m in messages[::-1] %}{{ m.role }}{% break %}{% endfor %}", v), "x");
    assert_eq!(render("{{ messages[0]['content'].split('</think>')[-1].strip() }}", v), "b");
    assert_eq!(
        render(
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            v
        ),
        "2"
    );
    assert_eq!(
        render("{{ messages[0].get('nothing', 'else') }}{{ 'user' in messages[0].role }}", v),
        "elseTrue"
    );
    assert_eq!(render("{{ strftime_now('%d %b %Y %H:%M') }}", v), "09 Mar 2026 08:05");
    assert_eq!(render("  {% if true %}\nx\n  {% endif %}\ny\n", v), "x\ny");
    assert_eq!(render("a {%- generation -%} b {% endgeneration %}c", v), "ab c");
    assert_eq!(render("{{ bos_token }}{% if tools is defined %}t{% endif %}", v), "");
    assert!(try_render("{{ raise_exception('no') }}", v).unwrap_err().to_string().contains("no"));
    assert!(try_render("{{ nothing.at_all }}", v).is_err());
}

#[test]
fn finds_templates_that_take_parts() {
    let parts = [
        "{% for message in messages %}{% for content in message['content'] %}{% endfor %}{% endfor %}",
        "{%- set rest = messages[1:] -%}{%- for m in rest -%}{%- for c in m.content | list -%}{%- endfor -%}{%- endfor -%}",
    ];
    let text = [
        "{% for message in messages %}{{ message['content'] }}{% endfor %}",
        "{% for m in messages %}{% for c in other.content %}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}",
    ];
    for source in parts {
        assert_eq!(content_format(source), ContentFormat::Parts, "{source}");
    }
    for source in text {
        assert_eq!(content_format(source), ContentFormat::Text, "{source}");
    }
}

#[test]
fn cuts_after_the_last_content() {
    let cut = |text: &str, last| cut_after(text.to_owned(), last);
    assert_eq!(cut("<a>One, two, <end>\n", "One, two, ").as_deref(), Some("<a>One, two, "));
    assert_eq!(cut("<a>One, two,<end>\n", " One, two, ").as_deref(), Some("<a>One, two,"));
    assert_eq!(cut("<a>é<b>é<c>", "é").as_deref(), Some("<a>é<b>é"));
    assert_eq!(cut("<a>", "other"), None);
}
