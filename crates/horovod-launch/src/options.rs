//! The one table of `horovodrun`'s options: names, groups, effects and help.

mod elastic;
mod general;
mod settings;

use std::ffi::OsStr;

use crate::args::{Options, text};
pub use elastic::ElasticOptions;
pub(crate) use settings::TIMELINE_MARK_CYCLES;

/// Every option of Horovod's launcher, in the order of the help.
static TABLES: &[&[OptionSpec]] = &[general::OPTIONS, settings::OPTIONS, elastic::OPTIONS];

/// All options.
pub(crate) fn all() -> impl Iterator<Item = &'static OptionSpec> {
    TABLES.iter().copied().flatten()
}

pub(crate) type SetValue = fn(&mut Options, &OsStr) -> Result<(), Wrong>;

/// What an option does.
pub(crate) enum Action {
    /// Takes no value.
    Flag(fn(&mut Options)),
    /// Takes no value: sets this variable of the ranks to this.
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
    /// A whole number of at least 0 for this variable of the ranks.
    Count(&'static str, &'static str),
    /// Text for this variable of the ranks.
    Text(&'static str, &'static str),
}

impl Action {
    /// The name of its value in the help; `None` if it takes none.
    pub(crate) fn value_name(&self) -> Option<&'static str> {
        match self {
            Self::Value(name, _)
            | Self::Pair(name, _)
            | Self::Count(name, _)
            | Self::Text(name, _) => Some(name),
            Self::Flag(_) | Self::Sets(..) | Self::Either(..) => None,
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

/// What stands behind a key of the file.
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
    pub(crate) help: &'static str,
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

    /// Does what the option says.
    pub(crate) fn apply(&self, options: &mut Options, value: &OsStr) -> Result<(), Wrong> {
        if let Some(note) = self.note {
            options.notes.push(format!("{}: {note}", self.title()));
        }
        match self.action {
            Action::Flag(set) => set(options),
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
            Action::Text(_, variable) => options.knobs.push((variable, text(value)?.to_owned())),
        }
        Ok(())
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
        help,
    }
}

/// Why a value was refused.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Wrong {
    Text(String),
    /// The value, and what it must be: `must be >= 0`.
    Range(String, &'static str),
}

impl Wrong {
    /// For people; `dest` is the option's name.
    pub(crate) fn say(&self, dest: &str) -> String {
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
        Err(Wrong::Range(number.to_string(), "must be >= 0"))
    } else {
        Ok(number)
    }
}
