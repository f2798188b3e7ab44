use std::collections::BTreeMap;

use super::super::{Dialect, EngineApi, ModelOptions};
use super::*;

const CHAT: &str = r#"{"messages":[{"role":"user","content":"x"}]}"#;

fn local() -> LocalTokenizers {
    let options = ModelOptions {
        folder: "tests/tokens/tiny".into(),
        dialect: Dialect::Vllm,
        chat_template: None,
        content_format: None,
    };
    LocalTokenizers::load(&BTreeMap::from([("m".to_owned(), options)]), 1 << 20, 1000).unwrap()
}

fn resolver(local: Option<LocalTokenizers>, engine: bool) -> Resolver {
    let engine = engine.then(|| Engine::new(EngineApi::VllmTokenize, Duration::from_millis(300)));
    Resolver::new(
        local,
        engine,
        ResolverOptions { parallel: 1, local_timeout: Duration::from_secs(10) },
    )
}

fn question(model: &str, path: &str, body: &str) -> Question {
    Question {
        model: model.into(),
        path: path.into(),
        body: Bytes::copy_from_slice(body.as_bytes()),
        now: Timestamp::UNIX_EPOCH,
        // Nobody listens there.
        engine: Some("http://127.0.0.1:1".parse().unwrap()),
        until: Instant::now() + Duration::from_secs(60),
    }
}

fn labels(outcome: &Outcome) -> Vec<(&'static str, &'static str)> {
    outcome.failures.iter().map(|(step, failure)| (step.as_str(), failure.as_str())).collect()
}

#[tokio::test]
async fn one_step_after_the_other() {
    let both = resolver(Some(local()), true);
    let made = both.tokens(question("m", "/v1/chat/completions?x=1", CHAT)).await;
    assert_eq!((made.step, labels(&made)), (Some(Step::Local), vec![]));
    let Tokens::Exact(ids) = made.tokens else { panic!("no ids") };
    assert_eq!(ids[0], 1);

    let made = both.tokens(question("other", "/v1/chat/completions", CHAT)).await;
    assert_eq!(made.tokens, Tokens::Estimate);
    assert_eq!(labels(&made), [("local", "no-tokenizer"), ("engine", "transport")]);

    let long = format!(r#"{{"prompt":"{}"}}"#, "x".repeat(1001));
    let made = both.tokens(question("m", "/v1/completions", &long)).await;
    assert_eq!(labels(&made), [("local", "too-large"), ("engine", "transport")]);

    let made = both.tokens(question("other", "/v1/completions", r#"{"prompt":[4,5]}"#)).await;
    assert_eq!((made.step, made.tokens), (Some(Step::Given), Tokens::Exact([4, 5].into())));

    let made = both.tokens(question("m", "/v1/embeddings", r#"{"input":"x"}"#)).await;
    assert_eq!(labels(&made), [("local", "unknown-api")]);

    let neither = resolver(None, false).tokens(question("m", "/v1/chat/completions", CHAT)).await;
    assert_eq!((neither.tokens, neither.step, neither.failures), (Tokens::Estimate, None, vec![]));
}

#[tokio::test]
async fn no_step_goes_on_when_nobody_waits() {
    let both = resolver(Some(local()), true);
    let late = Question { until: Instant::now(), ..question("m", "/v1/chat/completions", CHAT) };
    let _taken = Arc::clone(&both.turns).acquire_owned().await.unwrap();
    let made = both.tokens(late).await;
    assert_eq!(made.tokens, Tokens::Estimate);
    assert_eq!(labels(&made)[0], ("local", "busy"));
}

#[tokio::test]
async fn waits_only_so_long_for_its_turn() {
    let mut resolver = resolver(Some(local()), false);
    resolver.local_timeout = Duration::from_millis(50);
    let _taken = Arc::clone(&resolver.turns).acquire_owned().await.unwrap();
    let made = resolver.tokens(question("m", "/v1/chat/completions", CHAT)).await;
    assert_eq!(
        (made.tokens, made.failures),
        (Tokens::Estimate, vec![(Step::Local, Failure::Busy)])
    );
}
