use std::sync::Mutex;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

/// A server that answers each request with the reply for its path, and keeps what it was asked.
struct Fake {
    address: Uri,
    asked: Arc<Mutex<Vec<(String, String)>>>,
}

#[expect(clippy::disallowed_methods, reason = "a server for a test")]
async fn fake(replies: &'static [(&'static str, u16, &'static str)]) -> Fake {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let asked = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                let mut text = String::new();
                let mut chunk = [0; 4096];
                while let Ok(count @ 1..) = stream.read(&mut chunk).await {
                    text.push_str(&String::from_utf8_lossy(&chunk[..count]));
                    let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
                    let length =
                        head.to_lowercase().split_once("content-length: ").unwrap().1.to_owned();
                    if body.len() < length.split("\r\n").next().unwrap().parse().unwrap() {
                        continue;
                    }
                    let path = head.split(' ').nth(1).unwrap().to_owned();
                    let (_, status, reply) =
                        replies.iter().find(|(at, ..)| *at == path).unwrap_or(&("", 404, ""));
                    seen.lock().unwrap().push((path, body.to_owned()));
                    if *status == 0 {
                        continue;
                    }
                    let reply = format!(
                        "HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n{reply}",
                        reply.len()
                    );
                    stream.write_all(reply.as_bytes()).await.unwrap();
                    text.clear();
                }
            });
        }
    });
    Fake { address, asked }
}

async fn ask(
    fake: &Fake,
    engine: EngineApi,
    api: Api,
    body: &'static str,
) -> Result<Vec<u32>, Failure> {
    let engine = Engine::new(engine, Duration::from_millis(500));
    engine
        .tokens(&fake.address, api, &Bytes::from_static(body.as_bytes()))
        .await
        .map(|ids| ids.to_vec())
}

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"x"}],"stream":true}"#;
const TEXT: &str = r#"{"model":"m","prompt":"a b"}"#;

#[tokio::test]
async fn asks_vllm() {
    let fake = fake(&[
        ("/tokenize", 200, r#"{"count":2,"max_model_len":9,"tokens":[7,8],"token_strs":null}"#),
        (
            "/v1/chat/completions/render",
            200,
            r#"{"token_ids":[1,2],"features":null,"sampling_params":{}}"#,
        ),
        ("/v1/completions/render", 200, r#"[{"token_ids":[3]}]"#),
    ])
    .await;
    assert_eq!(ask(&fake, EngineApi::VllmTokenize, Api::Chat, CHAT).await, Ok(vec![7, 8]));
    assert_eq!(fake.asked.lock().unwrap().pop(), Some(("/tokenize".into(), CHAT.into())));
    assert_eq!(ask(&fake, EngineApi::VllmTokenize, Api::Completions, TEXT).await, Ok(vec![7, 8]));
    assert_eq!(ask(&fake, EngineApi::VllmRender, Api::Chat, CHAT).await, Ok(vec![1, 2]));
    assert_eq!(ask(&fake, EngineApi::VllmRender, Api::Completions, TEXT).await, Ok(vec![3]));
    let effort = r#"{"messages":[{"role":"user","content":"x"}],"reasoning_effort":"low"}"#;
    let made = ask(&fake, EngineApi::VllmTokenize, Api::Chat, effort).await;
    assert!(matches!(made, Err(Failure::Unsupported(_))), "{made:?}");
}

#[tokio::test]
async fn asks_llama_cpp_twice_for_a_chat() {
    let fake = fake(&[
        ("/apply-template", 200, r#"{"prompt":"<u>x"}"#),
        ("/tokenize", 200, r#"{"tokens":[5]}"#),
    ])
    .await;
    assert_eq!(ask(&fake, EngineApi::LlamaCpp, Api::Chat, CHAT).await, Ok(vec![5]));
    let asked: Vec<_> = fake.asked.lock().unwrap().drain(..).collect();
    let question = r#"{"content":"<u>x","add_special":true,"parse_special":true}"#;
    assert_eq!(
        asked,
        [("/apply-template".into(), CHAT.into()), ("/tokenize".into(), question.into())]
    );
    assert_eq!(ask(&fake, EngineApi::LlamaCpp, Api::Completions, TEXT).await, Ok(vec![5]));
    assert_eq!(fake.asked.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn says_what_went_wrong() {
    let silent = fake(&[("/tokenize", 0, "")]).await;
    assert_eq!(ask(&silent, EngineApi::VllmTokenize, Api::Chat, CHAT).await, Err(Failure::Timeout));
    let missing = fake(&[]).await;
    assert_eq!(
        ask(&missing, EngineApi::VllmTokenize, Api::Chat, CHAT).await,
        Err(Failure::Status(404))
    );
    for reply in ["{}", r#"{"tokens":"x"}"#, r#"{"tokens":[1],"count":2}"#, r#"{"tokens":[-1]}"#] {
        let replies = Box::leak(Box::new([("/tokenize", 200, reply)]));
        let odd = fake(replies).await;
        let made = ask(&odd, EngineApi::VllmTokenize, Api::Chat, CHAT).await;
        assert!(matches!(made, Err(Failure::Reply(_))), "{made:?}");
    }
    let pictures = fake(&[(
        "/v1/chat/completions/render",
        200,
        r#"{"token_ids":[1],"features":{"mm_hashes":{}}}"#,
    )])
    .await;
    assert_eq!(ask(&pictures, EngineApi::VllmRender, Api::Chat, CHAT).await, Err(Failure::Media));
    let closed = Fake { address: "http://127.0.0.1:1".parse().unwrap(), asked: Arc::default() };
    let made = ask(&closed, EngineApi::VllmTokenize, Api::Chat, CHAT).await;
    assert!(matches!(made, Err(Failure::Transport(_))), "{made:?}");
}
