//! What tells the tokens of prompts, as it is configured.

use std::sync::Arc;
use std::time::Duration;

use crate::config::Config;
use crate::tokens::{Engine, LocalTokenizers, Resolver, ResolverOptions};

/// Loads the tokenizers of a configuration; `None` where there are none, and no engine is asked either.
///
/// # Errors
/// A model's folder cannot be used; the text says which file, and what to do.
pub(super) async fn resolver(config: &Config) -> anyhow::Result<Option<Arc<Resolver>>> {
    let settings = &config.tokenizers;
    let timeout = Duration::from_millis(settings.engine_timeout_ms.into());
    let engine = settings.engine.api().map(|api| Engine::new(api, timeout));
    if !settings.are_used() {
        return Ok(None);
    }
    let local = if settings.models.is_empty() {
        None
    } else {
        let models = settings.models.clone();
        let size = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let (memo, text) = (size(settings.memo_bytes.into()), size(settings.max_text_bytes.into()));
        let loading =
            tokio::task::spawn_blocking(move || LocalTokenizers::load(&models, memo, text));
        let local = loading.await?.map_err(|(model, error)| {
            anyhow::Error::new(error).context(format!(
                "tokenizers.models: the tokenizer of `{model}` cannot be used; `folder` is one with the model's \
                 tokenizer.json, tokenizer_config.json and chat_template.jinja, as its repository has them"
            ))
        })?;
        tracing::info!(models = settings.models.len(), "tokenizers loaded");
        Some(local)
    };
    let options = ResolverOptions {
        parallel: usize::try_from(settings.parallel.get()).unwrap_or(usize::MAX),
        local_timeout: Duration::from_millis(settings.local_timeout_ms.into()),
    };
    Ok(Some(Arc::new(Resolver::new(local, engine, options))))
}
