//! `--check-build`: what this installation can do, found at run time without importing a framework.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Defines `findings()`: what is wrong with the installation. A text, since the package may be too broken to import.
pub(crate) const INSTALLATION: &str = include_str!("installation.py");

/// Prints, per framework, `name|version|adapter`: the installed version (or nothing) and whether this package has
/// an adapter for it; NCCL and CUDA's driver in the same way, with why they cannot be used behind it; and per thing that
/// is wrong with the installation `!|what`. Nothing of a framework is imported, and of the package last what finds NCCL.
const PROBE: &str = r#"
import importlib.metadata, importlib.util, os
spec = importlib.util.find_spec("horovod")
places = list(spec.submodule_search_locations or []) if spec else []
for name, module, packages in (
    ("TensorFlow", "tensorflow", ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-macos")),
    ("PyTorch", "torch", ("torch",)),
    ("MXNet", "mxnet", ("mxnet", "mxnet-cu112", "mxnet-cu102")),
    ("JAX", "jax", ("jax",)),
    ("Keras", "keras", ("keras", "tf_keras", "keras-nightly")),
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
for what in findings():
    print("!", what, sep="|")
try:
    from horovod.common._gpu_libraries import found
    for name, told in found().items():
        is_usable = not isinstance(told, str)
        version, problem = (" in ".join(told), "") if is_usable else ("", " ".join(told.split()))
        print(name.upper(), version, int(is_usable), problem, sep="|")
except Exception:
    pass
"#;

/// How a framework's tensors on a GPU travel where NCCL can be used.
#[derive(Clone, Copy)]
enum OnGpu {
    Nccl,
    /// In programs that XLA compiles, if the GPU is NVIDIA's; else through host memory.
    NcclWhereCompiled,
    HostMemory,
    AsOfBackend,
}

/// Horovod's names of its extensions, and the frameworks they are for; the last two are not the original's.
const EXTENSIONS: [(&str, &str, OnGpu); 5] = [
    ("tensorflow", "TensorFlow", OnGpu::NcclWhereCompiled),
    ("torch", "PyTorch", OnGpu::Nccl),
    ("mxnet", "MXNet", OnGpu::HostMemory),
    ("jax", "JAX", OnGpu::NcclWhereCompiled),
    ("keras", "Keras", OnGpu::AsOfBackend),
];

#[derive(Debug)]
struct Framework {
    name: String,
    version: Option<String>,
    has_adapter: bool,
    /// Why a library that is looked for when it is needed cannot be used.
    problem: Option<String>,
}

impl Framework {
    fn is_usable(&self) -> bool {
        self.version.is_some() && self.has_adapter
    }
}

/// Output of `--check-build`.
#[derive(Debug)]
pub struct BuildReport {
    /// The report, in Horovod's exact layout: programs read it.
    pub text: String,
    /// Notes for the user, printed before.
    pub notes: Vec<String>,
}

/// Asks the interpreter beside this program, else the first in `path`; `idle` are variables that are set and have no
/// effect.
pub fn check_build(verbose: bool, path: &OsStr, idle: &[String]) -> BuildReport {
    let python = python(path);
    let mut notes = Vec::new();
    let (found, wrong) = match probe(&python) {
        Ok((found, wrong)) => (Ok(found), wrong),
        Err(error) => (Err(error), Vec::new()),
    };
    let mut text = String::new();
    if verbose {
        text.push_str(&explain(&python, &found));
        text.push('\n');
    }
    if let Err(error) = &found {
        notes.push(format!(
            "{} cannot be asked for its frameworks: {error}",
            python.display()
        ));
    }
    if !wrong.is_empty() {
        notes.push(mixed(&python, &wrong.join("; ")));
    }
    if !idle.is_empty() {
        notes.push(format!(
            "note: {} no effect: nothing is built when horovod-rs is installed, it uses what it finds at run time",
            match idle {
                [one] => format!("{one} has"),
                all => format!("{} have", all.join(", ")),
            }
        ));
    }
    let found = found.unwrap_or_default();
    text.push_str(&layout(&found));
    BuildReport { text, notes }
}

fn has(found: &[Framework], name: &str) -> bool {
    found.iter().any(|f| f.name == name && f.is_usable())
}

/// Whether the driver of NVIDIA's GPUs, or the library for AMD's, is there.
fn has_gpus(found: &[Framework]) -> bool {
    has(found, "CUDA") || has(found, "ROCM")
}

/// NCCL's library comes with PyTorch also where nothing can use it.
fn uses_nccl(found: &[Framework]) -> bool {
    has(found, "NCCL") && has_gpus(found)
}

/// Error text for a mixed installation, with the cure.
fn mixed(python: &Path, wrong: &str) -> String {
    let fix = cure(&python.display().to_string(), env!("CARGO_PKG_VERSION"));
    format!("this installation is mixed with another: {wrong}. To repair it: {fix}")
}

/// How to get out of a mixed installation.
pub(crate) fn cure(python: &str, version: &str) -> String {
    format!(
        "{python} -m pip uninstall -y horovod horovod-rs; remove what is left of the folder horovod; {}",
        install(python, version)
    )
}

/// The command that installs this version. No index has it: pip takes the wheels from the folder `dist`.
pub(crate) fn install(python: &str, version: &str) -> String {
    format!("{python} -m pip install --find-links dist horovod-rs=={version}")
}

fn layout(found: &[Framework]) -> String {
    let mark = |is: bool| if is { 'X' } else { ' ' };
    let mut text = format!(
        "Horovod v{}:\n\nAvailable Frameworks:\n",
        env!("CARGO_PKG_VERSION")
    );
    for (_, name, _) in EXTENSIONS {
        text.push_str(&format!("    [{}] {name}\n", mark(has(found, name))));
    }
    text.push_str("\nAvailable Controllers:\n    [ ] MPI\n    [X] Gloo\n");
    text.push_str(&format!(
        "\nAvailable Tensor Operations:\n    [{}] NCCL\n    [ ] DDL\n    [ ] CCL\n    [ ] MPI\n",
        mark(uses_nccl(found))
    ));
    // The four spaces at the end are Horovod's, too.
    text.push_str("    [X] Gloo    \n");
    text
}

/// Horovod's text on each extension, with the difference to the original: versions, and the meaning of Gloo here.
fn explain(python: &Path, found: &io::Result<Vec<Framework>>) -> String {
    let found = found.as_ref().map(Vec::as_slice).unwrap_or_default();
    let mut text = String::new();
    for (extension, name, on_gpu) in EXTENSIONS {
        let framework = found.iter().find(|f| f.name == name);
        let is_built = framework.is_some_and(Framework::is_usable);
        text.push_str(&checked(extension, "", is_built));
        let detail = framework.and_then(|f| Some((f.version.as_ref()?, f.has_adapter)));
        match detail {
            Some((version, true)) => text.push_str(&format!(
                "{name} {version} is installed. {}\n",
                routes(on_gpu, found)
            )),
            Some((version, false)) => text.push_str(&format!(
                "{name} {version} is installed; this version of Horovod has no adapter for it.\n"
            )),
            None => text.push_str(&format!(
                "{name} is not installed for {}.\n",
                python.display()
            )),
        }
    }
    let nccl = found.iter().find(|f| f.name == "NCCL");
    let built = EXTENSIONS.iter().find(|(_, name, _)| has(found, name));
    if let Some((extension, ..)) = built {
        for (feature, is_built) in [
            ("MPI", false),
            ("Gloo", true),
            ("NCCL", uses_nccl(found)),
            ("DDL", false),
            ("CCL", false),
        ] {
            text.push_str(&checked(extension, &format!(" with {feature}"), is_built));
        }
    }
    let library = |name: &str| found.iter().find(|f| f.name == name);
    let (driver, rocm) = (library("CUDA"), library("ROCM"));
    for (name, library) in [
        ("NCCL", nccl),
        ("CUDA's driver", driver),
        ("ROCm's library, which has AMD's GPUs used,", rocm),
    ] {
        let start = format!("{name} is not built in but found when it is needed: ");
        match library.map(|library| (&library.version, &library.problem)) {
            Some((Some(version), _)) => text.push_str(&format!("{start}here it is {version}.\n")),
            Some((None, Some(why))) => text.push_str(&format!("{start}not here. {why}.\n")),
            _ => {}
        }
    }
    text.push_str(
        "Gloo means this package's own transport: shared memory within a host, TCP between hosts.\n",
    );
    text
}

/// The route of a framework's tensors here.
fn routes(on_gpu: OnGpu, found: &[Framework]) -> String {
    let gpu = match on_gpu {
        OnGpu::AsOfBackend => return "Its tensors go as those of its backend.".to_owned(),
        _ if !has_gpus(found) => {
            return "Its tensors go through Gloo; no GPU can be used here.".to_owned();
        }
        OnGpu::Nccl if has(found, "NCCL") => "through NCCL",
        OnGpu::NcclWhereCompiled if has(found, "ROCM") => {
            "through host memory and Gloo; compiled programs on AMD's GPUs are refused"
        }
        OnGpu::NcclWhereCompiled if has(found, "NCCL") => {
            "through host memory and Gloo, but in compiled programs through NCCL"
        }
        OnGpu::Nccl | OnGpu::NcclWhereCompiled | OnGpu::HostMemory => {
            "through host memory and Gloo"
        }
    };
    format!("Its tensors on the CPU go through Gloo, those on a GPU {gpu}.")
}

fn checked(extension: &str, with: &str, is_built: bool) -> String {
    let not = if is_built { "" } else { "NOT " };
    format!(
        "Checking whether extension {extension} was built{with}.\nExtension {extension} was {not}built{with}.\n"
    )
}

/// The interpreter beside this program (they are installed together), else the first in `path`.
pub(crate) fn python(path: &OsStr) -> PathBuf {
    let beside = std::env::current_exe().ok().and_then(|own| {
        let folder = own.parent()?.to_owned();
        ["python3", "python"]
            .iter()
            .map(|name| folder.join(name))
            .find(|file| file.is_file())
    });
    beside.unwrap_or_else(|| {
        std::env::split_paths(path)
            .flat_map(|place| ["python3", "python"].map(|name| place.join(name)))
            .find(|file| file.is_file())
            .unwrap_or_else(|| "python3".into())
    })
}

/// The frameworks, and what is wrong with the installation.
fn probe(python: &PathBuf) -> io::Result<(Vec<Framework>, Vec<String>)> {
    let output = Command::new(python)
        .args(["-c", &format!("{INSTALLATION}{PROBE}")])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()?;
    if !output.status.success() {
        return Err(io::Error::other(output.status.to_string()));
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    let wrong = printed.lines().filter_map(|line| line.strip_prefix("!|"));
    Ok((parse(&printed), wrong.map(str::to_owned).collect()))
}

fn parse(text: &str) -> Vec<Framework> {
    text.lines()
        .filter_map(|line| {
            let mut fields = line.splitn(4, '|');
            let name = fields.next()?.to_owned();
            let version = fields.next()?;
            let has_adapter = fields.next()? == "1";
            let answer = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            Some(Framework {
                name,
                version: answer(version),
                has_adapter,
                problem: fields.next().and_then(answer),
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_only_what_works_in_horovods_layout() {
        let found = parse("TensorFlow|2.20.0|0\nPyTorch|2.15.0+cpu|1\nMXNet||0\nJAX|0.10|1\n");
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(
            layout(&found),
            format!(
                "Horovod v{version}:\n\nAvailable Frameworks:\n    [ ] TensorFlow\n    [X] PyTorch\n    [ ] MXNet\n    \
                 [X] JAX\n    [ ] Keras\n\nAvailable Controllers:\n    [ ] MPI\n    [X] Gloo\n\nAvailable Tensor Operations:\n    [ ] NCCL\n    \
                 [ ] DDL\n    [ ] CCL\n    [ ] MPI\n    [X] Gloo    \n"
            )
        );
        let nccl = "PyTorch|2.15.0|1\nNCCL|2.30.7 in /x/libnccl.so.2|1\n";
        assert!(layout(&parse(nccl)).contains("Operations:\n    [ ] NCCL\n    [ ] DDL\n"));
        let with_nccl = parse(&format!("{nccl}CUDA|13.2 in /x/libcuda.so.1|1|\n"));
        assert!(layout(&with_nccl).contains("Operations:\n    [X] NCCL\n    [ ] DDL\n"));
        let words = explain(Path::new("py"), &Ok(with_nccl));
        assert!(words.contains("Extension torch was built with NCCL.\n"));
        assert!(words.contains("here it is 2.30.7 in /x/libnccl.so.2.\n"));
        let without = parse("PyTorch|2.15.0|1\nNCCL||0|a | b\nCUDA|13.2 in /x/libcuda.so.1|1|\n");
        let words = explain(Path::new("py"), &Ok(without));
        assert!(words.contains("Extension torch was NOT built with NCCL.\n"));
        assert!(
            words.contains("NCCL is not built in but found when it is needed: not here. a | b.\n")
        );
        assert!(words.contains(
            "CUDA's driver is not built in but found when it is needed: here it is 13.2"
        ));
        let words = explain(Path::new("py"), &Ok(found));
        assert!(words.contains("Extension torch was NOT built with NCCL.\n"));
        for line in [
            "Extension tensorflow was NOT built.\nTensorFlow 2.20.0 is installed; this version",
            "Extension torch was built.\nPyTorch 2.15.0+cpu is installed. Its tensors go through Gloo; no GPU can be",
            "MXNet is not installed for py.\n",
            "Checking whether extension torch was built with Gloo.\nExtension torch was built with Gloo.\n",
        ] {
            assert!(words.contains(line), "{line}: {words}");
        }
    }

    #[test]
    fn each_framework_is_told_where_its_tensors_go() {
        let all = "TensorFlow|2.21|1\nPyTorch|2.15|1\nMXNet|1.9.1|1\nJAX|0.10|1\nKeras|3.15|1\n";
        let check = |libraries: &str, expected: [&str; 5]| {
            let words = explain(Path::new("py"), &Ok(parse(&format!("{all}{libraries}"))));
            let is_note = |line: &&str| line.contains("is installed. ");
            let lines: Vec<&str> = words.lines().filter(is_note).collect();
            assert_eq!(lines.len(), expected.len(), "{words}");
            for (line, end) in lines.into_iter().zip(expected) {
                assert!(line.ends_with(end), "{libraries}: {line}");
            }
        };
        let (cuda, nccl) = ("CUDA|13.2 in /x|1|\n", "NCCL|2.30.7 in /x|1|\n");
        let none = "go through Gloo; no GPU can be used here.";
        let backend = "as those of its backend.";
        check(nccl, [none, none, none, none, backend]);
        let host = "those on a GPU through host memory and Gloo.";
        check(cuda, [host, host, host, host, backend]);
        let compiled = "but in compiled programs through NCCL.";
        let direct = "those on a GPU through NCCL.";
        check(
            &format!("{cuda}{nccl}"),
            [compiled, direct, host, compiled, backend],
        );
        let refused = "compiled programs on AMD's GPUs are refused.";
        let rocm = format!("ROCM|7.2 in /x|1|\n{nccl}");
        check(&rocm, [refused, direct, host, refused, backend]);
    }
}
