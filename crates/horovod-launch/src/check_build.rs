//! `--check-build`: what this installation can do, found at run time without importing a framework.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::environment;

/// Prints, per framework, `name|version|adapter`: the installed version (or nothing) and whether this package has
/// an adapter for it. Nothing of a framework or of the package is imported.
const PROBE: &str = r#"
import importlib.metadata, importlib.util, os
spec = importlib.util.find_spec("horovod")
places = list(spec.submodule_search_locations or []) if spec else []
for name, module, packages in (
    ("TensorFlow", "tensorflow", ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-macos")),
    ("PyTorch", "torch", ("torch",)),
    ("MXNet", "mxnet", ("mxnet", "mxnet-cu112", "mxnet-cu102")),
):
    version = ""
    for package in packages:
        try:
            version = importlib.metadata.version(package)
            break
        except importlib.metadata.PackageNotFoundError:
            pass
    adapter = any(os.path.exists(os.path.join(p, module, "__init__.py")) for p in places)
    print(name, version, int(adapter), sep="|")
"#;

struct Framework {
    name: String,
    version: Option<String>,
    has_adapter: bool,
}

/// The whole report.
pub(crate) fn report(verbose: bool) -> String {
    let python = python();
    let found = probe(&python);
    let mut text = String::new();
    if verbose {
        match &found {
            Ok(_) => text.push_str(&format!("Frameworks as seen by {}.\n\n", python.display())),
            Err(error) => {
                text.push_str(&format!(
                    "{} cannot be asked: {error}\n\n",
                    python.display()
                ));
            }
        }
    }
    text.push_str(&format!(
        "Horovod v{}:\n\nAvailable Frameworks:\n",
        env!("CARGO_PKG_VERSION")
    ));
    match found {
        Ok(frameworks) => frameworks.iter().for_each(|f| text.push_str(&line(f))),
        Err(_) => {
            text.push_str("    (unknown: no Python was found beside horovodrun or on the PATH)\n")
        }
    }
    // What is not there yet is said so: an empty box alone could also mean a broken installation.
    text.push_str("\nAvailable Controllers:\n    [ ] MPI\n    [X] Gloo\n");
    text.push_str("\nAvailable Tensor Operations:\n    [ ] NCCL\n    [ ] DDL\n    [ ] CCL\n    [ ] MPI\n    [X] Gloo\n");
    text.push_str(
        "\nGloo here means this package's own transport: shared memory within a host, TCP between hosts.\n",
    );
    text
}

fn line(framework: &Framework) -> String {
    let Framework {
        name,
        version,
        has_adapter,
    } = framework;
    match (version, has_adapter) {
        (Some(version), true) => format!("    [X] {name} {version}\n"),
        (Some(version), false) => {
            format!(
                "    [ ] {name} ({version} is installed; this version of Horovod has no adapter for it)\n"
            )
        }
        (None, _) => format!("    [ ] {name}\n"),
    }
}

/// The interpreter beside this program (they are installed together), else the first on the PATH.
fn python() -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|own| {
        let folder = own.parent()?.to_owned();
        ["python3", "python"]
            .iter()
            .map(|name| folder.join(name))
            .find(|file| file.is_file())
    });
    beside.unwrap_or_else(|| {
        let path = environment::path();
        std::env::split_paths(&path)
            .flat_map(|place| ["python3", "python"].map(|name| place.join(name)))
            .find(|file| file.is_file())
            .unwrap_or_else(|| "python3".into())
    })
}

fn probe(python: &PathBuf) -> io::Result<Vec<Framework>> {
    let output = Command::new(python)
        .args(["-c", PROBE])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()?;
    if !output.status.success() {
        return Err(io::Error::other(output.status.to_string()));
    }
    Ok(parse(&String::from_utf8_lossy(&output.stdout)))
}

fn parse(text: &str) -> Vec<Framework> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.split('|');
            let name = fields.next()?.to_owned();
            let version = fields.next()?;
            let has_adapter = fields.next()? == "1";
            let version = (!version.is_empty()).then(|| version.to_owned());
            Some(Framework {
                name,
                version,
                has_adapter,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_only_what_works() {
        let text = "TensorFlow|2.20.0|0\nPyTorch|2.15.0+cpu|1\nMXNet||0\n";
        let lines: String = parse(text).iter().map(line).collect();
        assert_eq!(
            lines,
            "    [ ] TensorFlow (2.20.0 is installed; this version of Horovod has no adapter for it)\n    \
             [X] PyTorch 2.15.0+cpu\n    [ ] MXNet\n"
        );
    }
}
