//! The real parts: where they are, and how each is started.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail, ensure};

/// Envoy, an engine with its model, and the picker.
#[derive(Debug)]
pub(crate) struct Parts {
    /// The folder of the scripts that find and run them.
    folder: PathBuf,
    found: BTreeMap<String, String>,
    pub(crate) picker: PathBuf,
}

/// How an engine is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Engine {
    pub(crate) slots: u32,
    /// Tokens of all slots together.
    pub(crate) context: u32,
    /// For prompts that lost their slot.
    pub(crate) cache_mib: u32,
}

impl Parts {
    /// Finds them, and sets up what is missing, which says so.
    ///
    /// # Errors
    /// There is no picker, or the rest cannot be had.
    pub(crate) fn find(folder: &Path, picker: Option<&Path>) -> Result<Self> {
        let script = folder.join("parts.py");
        ensure!(
            script.is_file(),
            "there is no {}: run this from the repository's root, or name the folder with --parts",
            script.display()
        );
        let picker = match picker {
            Some(picker) => picker.to_owned(),
            // Cargo puts it beside us.
            None => std::env::current_exe()?.with_file_name("llm-ring"),
        };
        ensure!(
            picker.is_file(),
            "there is no picker {}: build it (cargo build --release --bin llm-ring), or name one with --picker",
            picker.display()
        );
        let output =
            Command::new("python3").arg(&script).stderr(Stdio::inherit()).output().context(
                "python3 cannot be run; it finds and sets up Envoy, llama.cpp and a model",
            )?;
        ensure!(
            output.status.success(),
            "{} found no Envoy, llama.cpp or model: what it said is above",
            script.display()
        );
        let found = lines(&String::from_utf8_lossy(&output.stdout));
        for name in ["ENVOY", "MODEL"] {
            ensure!(found.contains_key(name), "{} named no {name}", script.display());
        }
        Ok(Self { folder: folder.to_owned(), found, picker })
    }

    pub(crate) fn engine(&self, port: u16, engine: Engine) -> Command {
        let python = self.found.get("LLAMA_PYTHON").map_or("python3", String::as_str);
        let mut command = Command::new(python);
        command.arg(self.folder.join("engine.py")).arg(&self.found["MODEL"]);
        let Engine { slots, context, cache_mib } = engine;
        command.args([
            port.to_string(),
            slots.to_string(),
            context.to_string(),
            cache_mib.to_string(),
        ]);
        if let Some(server) = self.found.get("LLAMA_SERVER") {
            command.env("LLAMA_SERVER", server);
        }
        command
    }

    pub(crate) fn envoy(&self) -> Command {
        Command::new(&self.found["ENVOY"])
    }

    /// Returns the gateway's configuration with its ports, those that are 0 chosen by Envoy.
    pub(crate) fn envoy_config(&self, picker_port: u16) -> Result<String> {
        let path = self.folder.join("envoy.yaml");
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let text = text
            .replace("$picker_port", &picker_port.to_string())
            .replace("$http_port", "0")
            .replace("$admin_port", "0");
        if text.lines().any(|line| line.contains('$')) {
            bail!("{} asks for more than three ports", path.display());
        }
        Ok(text)
    }

    /// Says what they are, to be kept with results: without the folders, which are this machine's own.
    pub(crate) fn versions(&self) -> Result<BTreeMap<&'static str, String>> {
        let envoy = first_line(self.envoy().arg("--version"))?;
        let envoy = envoy.rsplit_once("version: ").map_or(envoy.clone(), |(_, it)| it.to_owned());
        let model = Path::new(&self.found["MODEL"]).file_name().unwrap_or_default();
        let engine =
            if self.found.contains_key("LLAMA_SERVER") { "llama-server" } else { "xllamacpp" };
        Ok(BTreeMap::from([
            ("picker", first_line(Command::new(&self.picker).arg("--version"))?),
            ("envoy", envoy),
            ("engine", engine.to_owned()),
            ("model", model.to_string_lossy().into_owned()),
        ]))
    }
}

fn first_line(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let name = || command.get_program().to_string_lossy().into_owned();
    let output = output.with_context(|| format!("{} cannot be run", name()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default().trim().to_owned())
}

/// Reads lines `NAME=value`, as a shell would.
fn lines(text: &str) -> BTreeMap<String, String> {
    let line = |line: &str| {
        let (name, value) = line.split_once('=')?;
        // As Python's shlex.quote writes it.
        let value = value.strip_prefix('\'').and_then(|v| v.strip_suffix('\'')).unwrap_or(value);
        Some((name.to_owned(), value.replace("'\"'\"'", "'")))
    };
    text.lines().filter_map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_quoted_paths_are_read() {
        let found = lines("ENVOY=/a/envoy\nMODEL='/my models/it'\"'\"'s.gguf'\nnothing\n");
        assert_eq!(found["ENVOY"], "/a/envoy");
        assert_eq!(found["MODEL"], "/my models/it's.gguf");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn what_is_missing_is_a_clear_error() {
        let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/demo");
        let error = |folder: &str, picker: &str| {
            let error = Parts::find(Path::new(folder), Some(Path::new(picker))).unwrap_err();
            format!("{error:#}")
        };
        assert!(error("/nowhere", "/bin/sh").contains("--parts"));
        assert!(error(demo, "/nowhere/llm-ring").contains("--picker"));
    }
}
