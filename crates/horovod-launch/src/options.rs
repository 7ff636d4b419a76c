//! The one table of `horovodrun`'s options: names, groups, effects and help.

mod elastic;
mod foreign;
mod general;
mod given;
mod settings;

use std::ffi::OsStr;

use horovod_settings::{Accepts, Declared, NUMBER_MAX};

pub(crate) use foreign::advice as foreign_advice;
pub(crate) use given::text;
pub use given::{ElasticOptions, MpiOptions, Options, Shell, Starter, UsageError, Wanted};

/// Every option of Horovod's launcher, in the order of the help.
static TABLES: &[&[OptionSpec]] = &[general::OPTIONS, settings::OPTIONS, elastic::OPTIONS];

/// All options.
pub(crate) fn all() -> impl Iterator<Item = &'static OptionSpec> {
    TABLES.iter().copied().flatten()
}

pub(crate) type SetValue = fn(&mut Options, &OsStr) -> Result<(), Wrong>;

/// Effect of an option.
pub(crate) enum Action {
    /// Takes no value.
    Flag(fn(&mut Options)),
    /// Takes no value: turns this setting of the ranks on (1) or off (0).
    Turns(&'static dyn Declared, &'static str),
    /// Takes no value: sets this variable, which is no setting of ours, to this.
    Sets(&'static str, &'static str),
    /// Takes a value or none; the value only with `=`.
    Either(&'static str, SetValue),
    /// Takes one value: its name in the help, and what to do with it.
    Value(&'static str, SetValue),
    /// Takes two values.
    Pair(
        &'static str,
        fn(&mut Options, &OsStr, &OsStr) -> Result<(), Wrong>,
    ),
    /// A value for this setting of the ranks, which says what is accepted.
    Setting(&'static str, &'static dyn Declared, Written),
    /// A whole number of at least 0 for this variable, which is no setting of ours.
    Count(&'static str, &'static str),
}

/// How an option's value is written, and what the setting gets of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Written {
    /// A whole number.
    Whole,
    /// Any number; 3 becomes 3.0, as with Horovod.
    Decimal,
    /// A whole number of MiB, which becomes bytes.
    Mebibytes,
    /// Text, or one of the setting's words exactly.
    Text,
}

impl Action {
    fn is_scaled(&self) -> bool {
        matches!(self, Self::Setting(_, _, Written::Mebibytes))
    }

    /// The name of its value in the help; `None` if it takes none.
    pub(crate) fn value_name(&self) -> Option<&'static str> {
        match self {
            Self::Value(name, _)
            | Self::Pair(name, _)
            | Self::Setting(name, ..)
            | Self::Count(name, _) => Some(name),
            Self::Flag(_) | Self::Turns(..) | Self::Sets(..) | Self::Either(..) => None,
        }
    }
}

/// How the same thing is said in a `--config-file`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InFile {
    /// `section.key`.
    pub(crate) key: &'static str,
    pub(crate) form: Form,
}

/// Meaning of a key of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    /// This boolean means this option.
    Is(bool),
    Number,
    Text,
    /// Text, or a number that is taken as text.
    Words,
}

/// One option.
pub(crate) struct OptionSpec {
    pub(crate) names: &'static [&'static str],
    pub(crate) group: &'static str,
    /// At most one option of a named set may be given.
    pub(crate) exclusive: Option<&'static str>,
    /// Works, but is not advertised.
    pub(crate) hidden: bool,
    pub(crate) action: Action,
    pub(crate) in_file: Option<InFile>,
    /// Said when it is given: it is accepted, but means nothing (or something else) here.
    pub(crate) note: Option<&'static str>,
    /// The setting that it stands for, where the action does not say.
    about: Option<&'static dyn Declared>,
    /// Description; empty where the setting has it.
    help: &'static str,
}

impl OptionSpec {
    /// The names as argparse shows them: `-np/--num-proc`.
    pub(crate) fn title(&self) -> String {
        self.names.join("/")
    }

    /// `fusion_threshold_mb`: as Horovod's own messages call it.
    pub(crate) fn dest(&self) -> String {
        let name = self.names.last().copied().unwrap_or_default();
        name.trim_start_matches('-').replace('-', "_")
    }

    const fn only(mut self, set: &'static str) -> Self {
        self.exclusive = Some(set);
        self
    }

    const fn hide(mut self) -> Self {
        self.hidden = true;
        self
    }

    const fn file(mut self, key: &'static str, form: Form) -> Self {
        self.in_file = Some(InFile { key, form });
        self
    }

    const fn note(mut self, note: &'static str) -> Self {
        self.note = Some(note);
        self
    }

    const fn about(mut self, setting: &'static dyn Declared) -> Self {
        self.about = Some(setting);
        self
    }

    /// The setting of the ranks that it stands for.
    pub(crate) fn setting(&self) -> Option<&'static dyn Declared> {
        match self.action {
            Action::Turns(setting, _) | Action::Setting(_, setting, _) => Some(setting),
            _ => self.about,
        }
    }

    /// The variable of the ranks that it sets.
    pub(crate) fn variable(&self) -> Option<&'static str> {
        match self.action {
            Action::Sets(variable, _) | Action::Count(_, variable) => Some(variable),
            _ => self.setting().map(Declared::name),
        }
    }

    /// Its line of the help: what it does, what it accepts, its default.
    pub(crate) fn help(&self) -> String {
        let Some(setting) = self.setting() else {
            return self.help.to_owned();
        };
        if let Action::Turns(_, value) = self.action {
            // The documentation of a flag begins with the value that makes the difference.
            let does = setting.doc().strip_prefix(value).unwrap_or_default();
            let does = if self.help.is_empty() {
                does
            } else {
                self.help
            };
            let is_default = setting.is_default(value);
            let remark = if is_default {
                " (this is the default)"
            } else {
                ""
            };
            return format!("{}{remark}", does.trim_start());
        }
        let mut text = match (self.help, self.action.is_scaled()) {
            ("", true) => setting.doc().replacen("bytes", "MiB", 1),
            ("", false) => setting.doc().to_owned(),
            (own, _) => own.to_owned(),
        };
        if let Some(limits) = setting.accepts().limits() {
            text.push_str(&format!("; {limits}"));
        }
        let default = match setting.default_text() {
            bytes if self.action.is_scaled() => in_mebibytes(&bytes),
            default => default,
        };
        if default != "none" {
            text.push_str(&format!(" ({default})"));
        }
        text
    }

    /// Does what the option says.
    pub(crate) fn apply(&self, options: &mut Options, value: &OsStr) -> Result<(), Wrong> {
        if let Some(note) = self.note {
            options.notes.push(format!("{}: {note}", self.title()));
        }
        match self.action {
            Action::Flag(set) => set(options),
            Action::Turns(setting, value) => {
                options.knobs.push((setting.name(), value.to_owned()));
            }
            Action::Sets(variable, value) => options.knobs.push((variable, value.to_owned())),
            Action::Value(_, set) | Action::Either(_, set) => set(options, value)?,
            // Its two values come as one text with a space between them.
            Action::Pair(_, set) => {
                let value = text(value)?;
                let (first, second) = value.trim().split_once(' ').unwrap_or((value, ""));
                set(options, OsStr::new(first), OsStr::new(second.trim()))?;
            }
            Action::Count(_, variable) => {
                let count = at_least_zero(value)?.to_string();
                options.knobs.push((variable, count));
            }
            Action::Setting(_, setting, written) => {
                let value = accepted(setting, written, value)?;
                options.knobs.push((setting.name(), value));
            }
        }
        Ok(())
    }
}

const MIB: i64 = 1 << 20;

fn in_mebibytes(bytes: &str) -> String {
    bytes
        .parse::<i64>()
        .map_or_else(|_| bytes.to_owned(), |bytes| (bytes / MIB).to_string())
}

/// The value as the ranks get it, if the setting accepts it.
fn accepted(setting: &dyn Declared, written: Written, value: &OsStr) -> Result<String, Wrong> {
    // As a number: to compare, as the ranks get it, and for people.
    let (number, sent, shown) = match written {
        Written::Whole => {
            let number = whole(value)?;
            (number as f64, number.to_string(), number.to_string())
        }
        Written::Mebibytes => {
            let number = whole(value)?;
            let bytes = number.checked_mul(MIB).ok_or_else(|| too_large(value))?;
            (bytes as f64, bytes.to_string(), number.to_string())
        }
        Written::Decimal => {
            let number = number(value)?;
            (number, format!("{number:?}"), number.to_string())
        }
        Written::Text => {
            let given = text(value)?;
            return match setting.accepts() {
                Accepts::Words(words) if !words.contains(&given) => {
                    let words = words.join(", ");
                    Err(format!("invalid choice: {given:?} (choose from {words})").into())
                }
                _ => Ok(given.to_owned()),
            };
        }
    };
    if setting.check(&sent).is_ok() {
        return Ok(sent);
    }
    let (least, most) = match setting.accepts() {
        Accepts::Whole { least, most } => (least as f64, most.map(|most| most as f64)),
        Accepts::Decimal { least, most, .. } => (least, (most < NUMBER_MAX).then_some(most)),
        _ => (0.0, None),
    };
    match most {
        Some(most) => Err(Wrong::Range(shown, format!("must be in [{least}, {most}]"))),
        None if number > least => Err(too_large(value)),
        None => Err(Wrong::Range(shown, format!("must be >= {least}"))),
    }
}

const fn option(
    group: &'static str,
    names: &'static [&'static str],
    action: Action,
    help: &'static str,
) -> OptionSpec {
    OptionSpec {
        names,
        group,
        exclusive: None,
        hidden: false,
        action,
        in_file: None,
        note: None,
        about: None,
        help,
    }
}

/// Why a value was refused.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wrong {
    Text(String),
    /// The value, and what it must be: `must be >= 0`.
    Range(String, String),
}

impl Wrong {
    /// For people; `dest` is the option's name.
    pub(crate) fn text(&self, dest: &str) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Range(value, must) => format!("{dest}={value} {must}"),
        }
    }
}

impl From<String> for Wrong {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

fn number(value: &OsStr) -> Result<f64, Wrong> {
    let invalid = |_| Wrong::Text(format!("invalid number: {:?}", value.to_string_lossy()));
    text(value)?.trim().parse().map_err(invalid)
}

fn not_whole(value: &OsStr) -> Wrong {
    Wrong::Text(format!(
        "invalid whole number: {:?}",
        value.to_string_lossy()
    ))
}

fn too_large(value: &OsStr) -> Wrong {
    Wrong::Text(format!("{} is too large", value.to_string_lossy()))
}

fn whole(value: &OsStr) -> Result<i64, Wrong> {
    text(value)?.trim().parse().map_err(|_| not_whole(value))
}

fn at_least_zero(value: &OsStr) -> Result<i64, Wrong> {
    let number = whole(value)?;
    if number < 0 {
        Err(Wrong::Range(number.to_string(), "must be >= 0".to_owned()))
    } else {
        Ok(number)
    }
}
