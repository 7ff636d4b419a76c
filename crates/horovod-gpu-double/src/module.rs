//! Modules: what PTX text declares, as far as the driver would look at it; or C++ for HIP, which stands for its code.

use std::collections::BTreeMap;

use crate::codes;

/// Prefix of a program's text in the output of the double's compiler for HIP.
pub(crate) const HIP_CODE: &str = "code of HIP: ";

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    /// Declared parameters of each entry, as `u64`, `f64`, `b8[3848]` ...
    pub(crate) entries: BTreeMap<String, Vec<String>>,
}

impl Module {
    /// The kernels that the text declares; else the driver's error code.
    pub(crate) fn parse(text: &str, driver_version: i32, capability: i32) -> Result<Self, i32> {
        let text = without_comments(text);
        if let Some(source) = text.strip_prefix(HIP_CODE) {
            return Self::of_kernels(source, "__global__ void ", hip_parameter);
        }
        let version = directive(&text, ".version").ok_or(codes::INVALID_PTX)?;
        let (major, minor) = version.split_once('.').ok_or(codes::INVALID_PTX)?;
        let number = |text: &str| text.parse::<i32>().map_err(|_| codes::INVALID_PTX);
        // CUDA 12.x knows PTX 8.x, CUDA 13.x 9.x.
        let known = (driver_version / 1000 - 4, driver_version % 1000 / 10);
        if (number(major)?, number(minor)?) > known {
            return Err(codes::UNSUPPORTED_PTX_VERSION);
        }
        let target = directive(&text, ".target").ok_or(codes::INVALID_PTX)?;
        let target = target.trim_end_matches(',').strip_prefix("sm_");
        if number(target.ok_or(codes::INVALID_PTX)?)? > capability {
            return Err(codes::NO_BINARY_FOR_GPU);
        }
        Self::of_kernels(&text, ".entry", parameter)
    }

    /// Parses the text after each keyword: `name(parameters)`.
    fn of_kernels(
        text: &str,
        keyword: &str,
        parameter: fn(&str) -> Option<String>,
    ) -> Result<Self, i32> {
        let mut entries = BTreeMap::new();
        for part in text.split(keyword).skip(1) {
            let (name, rest) = part.split_once('(').ok_or(codes::INVALID_PTX)?;
            let (list, _) = rest.split_once(')').ok_or(codes::INVALID_PTX)?;
            let parameters = list.split(',').map(str::trim).filter(|p| !p.is_empty());
            let parameters = parameters.map(parameter).collect::<Option<Vec<_>>>();
            let parameters = parameters.ok_or(codes::INVALID_PTX)?;
            entries.insert(name.trim().to_owned(), parameters);
        }
        Ok(Self { entries })
    }
}

fn directive<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.split(name).nth(1)?.split_whitespace().next()
}

/// `.param .align 8 .b8 table[3848]` as `b8[3848]`.
fn parameter(text: &str) -> Option<String> {
    let rest = text.strip_prefix(".param")?;
    let words: Vec<&str> = rest.split_whitespace().collect();
    let name = words.last()?;
    let size = name.find('[').map_or("", |at| &name[at..]);
    let kind = words.iter().rev().skip(1).find(|w| w.starts_with('.'))?;
    Some(format!("{}{size}", kind.trim_start_matches('.')))
}

/// `double factor` as `f64`.
fn hip_parameter(text: &str) -> Option<String> {
    let kind = match text.split_whitespace().next()? {
        "u64" => "u64",
        "double" => "f64",
        "CopyTable" => "b8[3848]",
        _ => return None,
    };
    Some(kind.to_owned())
}

fn without_comments(text: &str) -> String {
    let mut kept = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('/') {
        kept.push_str(&rest[..at]);
        let (end, skip) = match &rest.as_bytes()[at..] {
            [b'/', b'/', ..] => ("\n", 0),
            [b'/', b'*', ..] => ("*/", 2),
            _ => {
                kept.push('/');
                rest = &rest[at + 1..];
                continue;
            }
        };
        kept.push(' ');
        rest = rest[at..]
            .find(end)
            .map_or("", |to| &rest[at + to + skip..]);
    }
    kept.push_str(rest);
    kept
}

#[cfg(test)]
mod tests {
    use super::Module;
    use crate::codes;

    const TEXT: &str = "// entries: .entry none(
.version 6.4
.target sm_70 /* .target sm_99 */
.address_size 64
.visible .entry one(
  .param .u64 dst, .param .f64 factor
) { ret; }
.visible .entry two(.param .align 8 .b8 table[3848]) { ret; }";

    #[test]
    fn entries_and_parameters_are_found() {
        let module = Module::parse(TEXT, 13020, 90).unwrap();
        let names: Vec<_> = module.entries.keys().map(String::as_str).collect();
        assert_eq!(names, ["one", "two"]);
        assert_eq!(module.entries["one"], ["u64", "f64"]);
        assert_eq!(module.entries["two"], ["b8[3848]"]);
    }

    #[test]
    fn what_the_driver_cannot_take_is_refused() {
        let newer = TEXT.replace("6.4", "9.3");
        let refused = Module::parse(&newer, 13020, 90).unwrap_err();
        assert_eq!(refused, codes::UNSUPPORTED_PTX_VERSION);
        let refused = Module::parse(TEXT, 13020, 60).unwrap_err();
        assert_eq!(refused, codes::NO_BINARY_FOR_GPU);
        assert_eq!(
            Module::parse("ELF", 13020, 90).unwrap_err(),
            codes::INVALID_PTX
        );
    }
}
