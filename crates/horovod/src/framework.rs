//! The parts that the crates for frameworks share: models that ranks compare, bytes of one rank for all, and the form of
//! elastic states.
#![forbid(unsafe_code)]

use std::cmp::Ordering;
use std::fmt::Display;
use std::sync::atomic::Ordering::Relaxed;

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::reduction::ReduceOp;

/// Two ranks of the job, each with its first line that differs; `None` on a rank that has no line of that key.
pub type Sides = [(usize, Option<String>); 2];

/// Why ranks cannot do together what they are about to do; the same on all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// Two ranks have different lines.
    Differ(Sides),
    /// A rank of the job has found a mistake of its own, with its text.
    Mistake(usize, String),
}

/// Lines that all ranks should have alike, in any order. Each is a key, a tab and a value.
#[derive(Clone, Debug)]
pub struct Lines {
    text: String,
    fingerprint: u64,
}

impl Lines {
    /// These lines.
    pub fn new(mut lines: Vec<String>) -> Self {
        lines.sort_unstable_by(|one, other| place(one).cmp(&place(other)));
        let text = lines.join("\n");
        let fingerprint = fingerprint(FINGERPRINT_OF_NOTHING, &text);
        Self { text, fingerprint }
    }

    /// Compares the lines of all ranks, in operations of this name, and one more line that changes from call to call.
    ///
    /// A rank that has found a mistake passes its text, and no rank goes on: else the others would wait for that rank.
    ///
    /// # Errors
    /// Those of [`Communicator`].
    pub fn compare(
        &self,
        hvd: &Communicator,
        name: &str,
        changing: Option<&str>,
        mistake: Option<String>,
    ) -> Result<Option<Obstacle>> {
        if hvd.size() == 1 {
            return Ok(mistake.map(|text| Obstacle::Mistake(hvd.members()[0], text)));
        }
        let own = changing.map_or(self.fingerprint, |line| fingerprint(self.fingerprint, line));
        let entry = [own, u64::from(mistake.is_some())];
        let all = hvd.named(name).allgather(&entry, entry.len())?;
        let mut entries = all.chunks(entry.len());
        let texts = |own: Option<String>| -> Result<String> {
            let own = own.unwrap_or_default();
            let texts = hvd.named(&format!("{name}.differ"));
            let texts = texts.allgather(own.as_bytes(), 1)?;
            Ok(String::from_utf8_lossy(&texts).into_owned())
        };
        if let Some(rank) = entries.clone().position(|entry| entry[1] != 0) {
            let text = texts(mistake.filter(|_| hvd.rank() == rank))?;
            return Ok(Some(Obstacle::Mistake(hvd.members()[rank], text)));
        }
        let Some(other) = entries.position(|entry| entry[0] != all[0]) else {
            return Ok(None);
        };
        // Rank 0 and the first one that differs send their lines to all.
        let is_side = hvd.rank() == 0 || hvd.rank() == other;
        let texts = texts(is_side.then(|| {
            let mut lines: Vec<&str> = self.text.lines().chain(changing).collect();
            lines.sort_unstable_by(|one, other| place(one).cmp(&place(other)));
            format!("{}\0", lines.join("\n"))
        }))?;
        let (first, second) = texts.split_once('\0').unwrap_or((&texts, ""));
        let [one, two] = first_difference(first, second.trim_end_matches('\0'));
        let members = hvd.members();
        let sides = [(members[0], one), (members[other], two)];
        Ok(Some(Obstacle::Differ(sides)))
    }
}

/// The settings of a distributed optimizer, which all ranks should have alike.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How gradients of the ranks combine.
    pub op: ReduceOp,
    /// How many operations reduce the gradients of one type.
    pub groups: usize,
    /// How many gradients a rank adds before it reduces their sum.
    pub passes: usize,
    /// The largest norm of all gradients of a step together.
    pub max_norm: Option<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            op: ReduceOp::Average,
            groups: 1,
            passes: 1,
            max_norm: None,
        }
    }
}

impl Settings {
    /// Refuses settings without a meaning.
    ///
    /// # Errors
    /// The first mistake, as text for the user.
    pub fn check(&self) -> std::result::Result<(), String> {
        for (name, value) in [
            ("groups", self.groups),
            ("backward_passes_per_step", self.passes),
        ] {
            if value == 0 {
                return Err(format!("{name} was set to 0; pass 1 or more"));
            }
        }
        self.max_norm.map_or(Ok(()), check_norm)
    }

    /// A line for each setting.
    pub fn lines(&self) -> [String; 4] {
        [
            format!("op\t{:?}", self.op),
            format!("groups\t{}", self.groups),
            format!("backward_passes_per_step\t{}", self.passes),
            format!("max_norm\t{:?}", self.max_norm),
        ]
    }
}

/// Refuses a largest norm that is not above 0, also NaN.
///
/// # Errors
/// The mistake, as text for the user.
pub fn check_norm(max: f64) -> std::result::Result<(), String> {
    if max > 0.0 {
        return Ok(());
    }
    Err(format!(
        "the norm of gradients was limited to {max}; pass a number above 0"
    ))
}

const OPTIMIZER: &str = "optimizer";

/// A line for a new optimizer: its number in the order in which this rank makes them. Two optimizers of equal models
/// differ by this line alone, where ranks would otherwise mix their gradients.
pub fn optimizer_line(hvd: &Communicator) -> String {
    let number = hvd.optimizers.fetch_add(1, Relaxed);
    format!("{OPTIMIZER}\tnumber {number} in the order in which it made them")
}

/// The text of an error about ranks whose models differ.
pub fn difference_text(sides: &Sides) -> String {
    let [(first, one), (second, other)] = sides;
    let is_optimizer = |line: &Option<String>| {
        let line = line.as_deref();
        line.is_some_and(|line| line.split(' ').next() == Some(OPTIMIZER))
    };
    if is_optimizer(one) || is_optimizer(other) {
        let [one, other] = [one, other].map(|side| side.as_deref().unwrap_or("no optimizer"));
        return format!(
            "the ranks train differently: rank {first} reduces for {one}, rank {second} for {other}; make the optimizers \
             in the same order on all ranks, and step them in the same order"
        );
    }
    let found = match (one, other) {
        (Some(one), None) => {
            format!("rank {first} has {one}, rank {second} has nothing of that name")
        }
        (None, Some(other)) => {
            format!("rank {second} has {other}, rank {first} has nothing of that name")
        }
        (one, other) => {
            let [one, other] = [one, other].map(|side| side.as_deref().unwrap_or_default());
            format!("rank {first} has {one}, rank {second} has {other}")
        }
    };
    format!(
        "the ranks train differently: {found}; make the same parameters, settings and steps on all ranks"
    )
}

/// The text of an error about a mistake of one rank.
pub fn mistake_text(rank: usize, mistake: &str) -> String {
    format!("rank {rank} cannot take part in this call: {mistake}")
}

/// The place of a line in the order of lines. Another optimizer explains all other differences, so it comes first.
fn place(line: &str) -> (bool, &str) {
    (key(line) != OPTIMIZER, line)
}

fn key(line: &str) -> &str {
    line.split('\t').next().unwrap_or_default()
}

/// The first key of ordered lines whose values differ, or that one side lacks.
fn first_difference(first: &str, second: &str) -> [Option<String>; 2] {
    let (mut first, mut second) = (first.lines().peekable(), second.lines().peekable());
    while first.peek() == second.peek() && first.peek().is_some() {
        first.next();
        second.next();
    }
    let shown = |line: &str| Some(line.replace('\t', " "));
    match (first.next(), second.next()) {
        (Some(one), Some(two)) => match place(key(one)).cmp(&place(key(two))) {
            Ordering::Equal => [shown(one), shown(two)],
            Ordering::Less => [shown(one), None],
            Ordering::Greater => [None, shown(two)],
        },
        (one, two) => [one.and_then(shown), two.and_then(shown)],
    }
}

const FINGERPRINT_OF_NOTHING: u64 = 0xcbf2_9ce4_8422_2325;

/// The fingerprint of a text behind the one whose fingerprint is `before` (FNV-1a).
fn fingerprint(before: u64, text: &str) -> u64 {
    text.bytes().fold(before, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// The bytes of the rank `root`, on all ranks; those of the others are dropped.
///
/// # Errors
/// Those of [`Communicator`]; [`Error::Invalid`] on all ranks if the bytes do not fit into the memory of one.
pub fn broadcast_bytes(hvd: &Communicator, mut bytes: Vec<u8>, root: usize) -> Result<Vec<u8>> {
    let mut len = [bytes.len() as u64];
    hvd.broadcast_in_place(&mut len, root)?;
    let mut fits = true;
    if hvd.rank() != root {
        bytes.clear();
        let wanted = usize::try_from(len[0]).ok();
        match wanted.filter(|len| bytes.try_reserve_exact(*len).is_ok()) {
            Some(wanted) => bytes.resize(wanted, 0),
            None => fits = false,
        }
    }
    // No rank leaves between the two broadcasts: the others would wait in the second.
    if hvd.allreduce(&[u8::from(fits)], ReduceOp::Min)? == [0] {
        return Err(Error::invalid(format!(
            "the {} bytes of rank {root} do not fit into the memory of {}",
            len[0],
            if fits { "another rank" } else { "this rank" }
        )));
    }
    hvd.broadcast_in_place(&mut bytes, root)?;
    Ok(bytes)
}

/// An elastic state as bytes: parts of a framework, and the progress of the training.
pub fn join(parts: &[&[u8]], progress: &[u8]) -> Vec<u8> {
    let mut joined = Vec::new();
    for part in parts {
        joined.extend_from_slice(&(part.len() as u64).to_le_bytes());
        joined.extend_from_slice(part);
    }
    joined.extend_from_slice(progress);
    joined
}

/// The first part of a state that [`join`] has made, and the bytes behind it.
///
/// # Errors
/// [`Error::Invalid`] if the bytes end before the part does.
pub fn cut(joined: &[u8]) -> Result<(&[u8], &[u8])> {
    let part = joined.split_first_chunk().and_then(|(len, rest)| {
        let len = usize::try_from(u64::from_le_bytes(*len)).ok()?;
        rest.split_at_checked(len)
    });
    part.ok_or_else(|| state_error(&"its bytes end too early"))
}

/// The error of a framework's elastic state.
pub fn state_error(why: &dyn Display) -> Error {
    Error::invalid(format!(
        "the elastic state cannot be saved or restored: {why}"
    ))
}

/// The text of the error for saved parameters that do not fit the model.
pub fn another_model_text(why: &str) -> String {
    format!("the parameters are those of another model: {why}; use the same model on all ranks")
}
