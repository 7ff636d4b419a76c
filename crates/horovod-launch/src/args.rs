//! The parser of `horovodrun`'s command line, with the habits of Python's argparse.
//!
//! Single-dash options may be long (`-np 4`, `-np=4`, `-cb`), and long options may be shortened to a unique prefix. The
//! first word that is not an option starts the command, which is passed on untouched.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use horovod_settings::{self as settings, ProcessEnvironment};

use crate::allocation::{self};
use crate::config_file;
use crate::options::{self, OptionSpec};
pub use crate::options::{ElasticOptions, MpiOptions, Options, Shell, Starter, UsageError, Wanted};
use crate::stdin;
use crate::trace;
pub use horovod_doctor::Form as DoctorForm;

fn refuse<T>(text: impl Into<String>) -> Result<T, UsageError> {
    Err(UsageError(text.into()))
}

/// Reads the words after the program's name.
pub fn parse(words: &[OsString]) -> Result<Options, UsageError> {
    let mut options = Options::default();
    let mut seen: Vec<&'static OptionSpec> = Vec::new();
    let mut rest = words.iter();
    while let Some(word) = rest.next() {
        let bytes = word.as_bytes();
        if bytes == b"--" {
            options.command = rest.cloned().collect();
            break;
        }
        if bytes.first() != Some(&b'-') || bytes.len() == 1 {
            options.command = std::iter::once(word).chain(rest).cloned().collect();
            break;
        }
        let (spec, attached) = find(bytes)?;
        if let Some(earlier) = seen.iter().find(|other| excludes(other, spec)) {
            return refuse(format!(
                "argument {}: not allowed with argument {}",
                spec.title(),
                earlier.title()
            ));
        }
        seen.push(spec);
        let value = if let options::Action::Either(_, _) = spec.action {
            attached.unwrap_or_default()
        } else if spec.action.value_name().is_none() {
            if let Some(value) = attached {
                return refuse(format!(
                    "argument {}: takes no value, got {:?}",
                    spec.title(),
                    value.to_string_lossy()
                ));
            }
            OsString::new()
        } else if let Some(value) = attached {
            value
        } else {
            match rest.next() {
                Some(next) if !is_option(next.as_bytes()) => next.clone(),
                _ => return refuse(format!("argument {}: expected one value", spec.title())),
            }
        };
        let value = match spec.action {
            options::Action::Pair(..) => match rest.next() {
                Some(next) if !is_option(next.as_bytes()) => {
                    let mut both = value;
                    both.push(" ");
                    both.push(next);
                    both
                }
                _ => return refuse(format!("argument {}: expected two values", spec.title())),
            },
            _ => value,
        };
        spec.apply(&mut options, &value).map_err(|wrong| {
            UsageError(format!(
                "argument {}: {}",
                spec.title(),
                wrong.text(&spec.dest())
            ))
        })?;
        if options.help || options.version || options.completion.is_some() {
            return Ok(options);
        }
    }
    let mut given = config_file::Given::on_command_line(&seen);
    if let Some(file) = options.config_file.clone() {
        config_file::merge(&mut options, &mut given, &file)?;
    }
    config_file::merge_defaults(&mut options, &mut given)?;
    complete(options)
}

/// Checks what no single option can know.
fn complete(mut options: Options) -> Result<Options, UsageError> {
    let is_recorded = |(name, _): &(&str, String)| *name == settings::TIMELINE.name;
    if !options.knobs.iter().any(is_recorded) {
        options
            .knobs
            .retain(|(name, _)| *name != settings::TIMELINE_MARK_CYCLES.name);
    }
    if let Some((_, wanted)) = &mut options.trace {
        *wanted = trace::parse_job(&options.command)
            .map_err(|wrong| UsageError(format!("argument --trace: {wrong}")))?;
        return Ok(options);
    }
    if let Some(wanted) = options.status {
        options.status = Some(chosen("--status", wanted, &options.command)?);
    }
    if let Some(wanted) = options.top {
        options.top = Some(chosen("--top", wanted, &options.command)?);
    }
    if options.check_build || options.status.is_some() || options.top.is_some() {
        return Ok(options);
    }
    // Hosts that a script names are not those of an allocation.
    let names_hosts = options.hosts.is_some() || options.hostfile.is_some() || options.dialed;
    if !names_hosts && options.elastic.script.is_none() {
        options.allocation = match allocation::find(&ProcessEnvironment) {
            Ok(found) => found,
            // With a number of processes a job needs no allocation.
            Err(why) if options.num_proc.is_some() => {
                let note = format!("{why}; all processes start on this host");
                options.notes.push(note);
                None
            }
            Err(why) => return Err(UsageError(why)),
        };
    }
    if let Some(allocation) = &mut options.allocation {
        match options.num_proc {
            None => {
                options.num_proc = Some(allocation.slots());
                options.notes.push(allocation.describe());
            }
            // On a host of its own a user may start as many processes as without a batch system.
            Some(count) => {
                if let [only] = &mut allocation.hosts[..] {
                    only.slots = only.slots.max(count);
                }
            }
        }
    }
    if options.doctor.is_some() {
        return Ok(options);
    }
    if options.num_proc.is_none() {
        return refuse("the following arguments are required: -np/--num-proc");
    }
    if options.command.is_empty() {
        return refuse("no command given: what should each process run?");
    }
    let notes = options.mpi.check(&options);
    options.notes.extend(notes.map_err(UsageError)?);
    if options.mpi.starter == Starter::Jsrun && !options.network_interfaces.is_empty() {
        options.notes.push(format!(
            "--network-interfaces: jsrun has no such option, only Horovod's own links keep to {}",
            options.network_interfaces.join(",")
        ));
    }
    let is_one = options.num_proc == Some(1) && !options.elastic.is_on();
    let who_gets_it = match options.mpi.starter {
        Starter::Own if is_one => None,
        Starter::Own => Some("only rank 0 gets"),
        Starter::Mpi | Starter::Jsrun => Some("no rank gets with --mpi or --jsrun"),
    };
    if let Some(who) = who_gets_it
        && stdin::gives_script(&options.command)
    {
        return refuse(format!(
            "the command reads its script from the standard input, which {who}: save the script in a file, or pass it \
             with -c"
        ));
    }
    options
        .elastic
        .check(options.num_proc.unwrap_or(1))
        .map_err(UsageError)?;
    let size = options.num_proc.unwrap_or(1);
    let is_absent = |(_, last): &&(u32, u32)| *last >= size && !options.elastic.is_on();
    if let Some((_, last)) = options.output_ranks.iter().flatten().find(is_absent) {
        return refuse(format!(
            "argument --output-ranks: there is no rank {last}, with {size} processes"
        ));
    }
    for name in options.elastic.idle() {
        options.notes.push(format!(
            "{name}: no effect, the job is not elastic without --min-np or --host-discovery-script"
        ));
    }
    Ok(options)
}

/// The job that the value of an option or the word after it names.
fn chosen(option: &str, by_value: Wanted, words: &[OsString]) -> Result<Wanted, UsageError> {
    let by_word = trace::parse_job(words)
        .map_err(|wrong| UsageError(format!("argument {option}: {wrong}")))?;
    match (by_value, by_word) {
        (Wanted::All, named) | (named, Wanted::All) => Ok(named),
        _ => refuse(format!("argument {option}: the job is named twice")),
    }
}

fn excludes(a: &OptionSpec, b: &OptionSpec) -> bool {
    !std::ptr::eq(a, b) && a.exclusive.is_some() && a.exclusive == b.exclusive
}

/// An option cannot be the value of another, but a negative number can.
fn is_option(word: &[u8]) -> bool {
    let number = word.len() > 1 && word[1..].iter().all(|b| b.is_ascii_digit() || *b == b'.');
    word.first() == Some(&b'-') && word.len() > 1 && !number
}

type Found = (&'static OptionSpec, Option<OsString>);

fn find(word: &[u8]) -> Result<Found, UsageError> {
    let named =
        |name: &[u8]| options::all().find(|spec| spec.names.iter().any(|n| n.as_bytes() == name));
    if let Some(spec) = named(word) {
        return Ok((spec, None));
    }
    let (left, right) = match word.iter().position(|b| *b == b'=') {
        Some(at) => (
            &word[..at],
            Some(OsString::from_vec(word[at + 1..].to_vec())),
        ),
        None => (word, None),
    };
    if right.is_some()
        && let Some(spec) = named(left)
    {
        return Ok((spec, right));
    }
    let mut found: Vec<Found> = options::all()
        .filter(|spec| spec.names.iter().any(|n| n.as_bytes().starts_with(left)))
        .map(|spec| (spec, right.clone()))
        .collect();
    // `-p22`: a one-letter option with its value attached.
    if !word.starts_with(b"--")
        && word.len() > 2
        && let Some(spec) = named(&word[..2])
        && spec.action.value_name().is_some()
    {
        found.push((spec, Some(OsString::from_vec(word[2..].to_vec()))));
    }
    let typed = String::from_utf8_lossy(word).into_owned();
    match found.len() {
        1 => Ok(found.remove(0)),
        0 => refuse(match (options::foreign_advice(&typed), nearest(&typed)) {
            (Some(advice), _) => format!("unknown option {typed}: {advice}"),
            (None, Some(name)) => format!("unknown option {typed} (did you mean {name}?)"),
            (None, None) => format!("unknown option {typed}"),
        }),
        _ => refuse(format!(
            "ambiguous option: {typed} could match {}",
            found
                .iter()
                .map(|(spec, _)| spec.title())
                .collect::<Vec<_>>()
                .join(", ")
        )),
    }
}

/// The option name that differs least from what was typed, unless it differs too much to help.
fn nearest(typed: &str) -> Option<&'static str> {
    let typed = typed.split('=').next().unwrap_or(typed);
    let names = options::all()
        .filter(|spec| !spec.hidden)
        .flat_map(|spec| spec.names.iter().copied());
    horovod_settings::nearest_of(typed, names)
}

/// Usage text.
fn usage() -> &'static str {
    "usage: horovodrun -np NUM_PROC [-H HOST:SLOTS,... | --hostfile FILE] [options] command [args ...]\n       \
     horovodrun --doctor [-H HOST:SLOTS,... | --hostfile FILE] [options] [command [args ...]]\n       \
     horovodrun --status [JOB] | --top [JOB] | --trace TIME [JOB]\n       \
     horovodrun --check-build | --completion SHELL | --version | --help"
}

/// The whole help text, from the table.
pub fn help() -> String {
    let mut text = format!("{}\n", usage());
    let mut group = "";
    for spec in options::all().filter(|spec| !spec.hidden) {
        if spec.group != group {
            group = spec.group;
            text.push_str(&format!("\n{group}:\n"));
        }
        let mut left = spec.names.join(", ");
        if let Some(value) = spec.action.value_name() {
            left = format!("{left} {value}");
        }
        if let options::Action::Either(value, _) = spec.action {
            left = format!("{left}[={value}]");
        }
        if left.len() > 28 {
            text.push_str(&format!("  {left}\n{:32}{}\n", "", spec.help()));
        } else {
            text.push_str(&format!("  {left:<29} {}\n", spec.help()));
        }
    }
    text
}

#[cfg(test)]
mod tests;
