//! The view as lines of text for a terminal of a given size: a pure function of the figures and of what the user chose.

use std::cmp::Ordering;

use horovod_metrics::{counted, in_bytes};

use super::document::{Document, Figures, Hang, Row, Slow};
use super::keys::Key;

/// A report of this age is old: a rank reports once a second.
const OLD_S: f64 = 5.0;
/// A rank is named as the latest from this share of the time on.
const AWAITED_MIN: f64 = 0.01;
/// Lines about ranks that others wait for.
const MESSAGES_MAX: usize = 3;
/// Ranks that a line names.
const NAMED_MAX: usize = 4;
/// Columns beside the host and the bar.
const FIXED_WIDTH: usize = 51;
const HOST_WIDTH: (usize, usize) = (10, 24);
const BAR_WIDTH: (usize, usize) = (8, 40);

/// The meaning of a piece of text, which decides its colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Paint {
    Plain,
    Title,
    Soft,
    Alarm,
    Computing,
    Communicating,
    Waiting,
}

/// A piece of a line.
pub(super) type Piece = (Paint, String);

/// One line of the terminal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Line(pub(super) Vec<Piece>);

impl Line {
    fn of(paint: Paint, text: impl Into<String>) -> Self {
        Self(vec![(paint, text.into())])
    }

    fn add(mut self, paint: Paint, text: impl Into<String>) -> Self {
        self.0.push((paint, text.into()));
        self
    }

    /// The line in so many columns. Names come from scripts and hosts: control characters are not passed on.
    fn fitted(mut self, width: usize) -> Self {
        let mut left = width;
        for (_, text) in &mut self.0 {
            let shown = text.chars().take(left);
            *text = shown
                .map(|c| if c.is_control() { '?' } else { c })
                .collect();
            left -= text.chars().count();
        }
        self.0.retain(|(_, text)| !text.is_empty());
        self
    }
}

/// The column by which ranks are sorted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum SortBy {
    #[default]
    Rank,
    Awaited,
    Waiting,
    Communicating,
    Computing,
    Memory,
}

impl SortBy {
    const ALL: [(Self, &'static str); 6] = [
        (Self::Rank, "rank"),
        (Self::Awaited, "awaited"),
        (Self::Waiting, "waiting"),
        (Self::Communicating, "communicating"),
        (Self::Computing, "computing"),
        (Self::Memory, "memory"),
    ];

    fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }

    fn next(self) -> Self {
        Self::ALL[(self as usize + 1) % Self::ALL.len()].0
    }

    /// Ranks ascend; of all others the largest come first.
    fn compare(self, a: &Row, b: &Row) -> Ordering {
        let largest = |get: fn(&Row) -> f64| get(b).total_cmp(&get(a));
        match self {
            Self::Rank => a.figures.rank.cmp(&b.figures.rank),
            Self::Awaited => largest(|row| row.rates.awaited),
            Self::Waiting => largest(|row| row.rates.waiting),
            Self::Communicating => largest(|row| row.rates.communicating),
            Self::Computing => largest(|row| row.rates.computing),
            Self::Memory => b.figures.memory_bytes.cmp(&a.figures.memory_bytes),
        }
    }
}

/// The choices of the user.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Choice {
    sort_by: SortBy,
    is_reversed: bool,
    /// The first row that is shown.
    offset: usize,
    /// Rows that the last frame had room for, and all rows.
    room: usize,
    rows: usize,
}

impl Choice {
    /// Takes a key other than that which quits.
    pub(super) fn take(&mut self, key: Key) {
        let page = self.room.max(1);
        let last = self.rows.saturating_sub(self.room);
        match key {
            Key::Sort => {
                self.sort_by = self.sort_by.next();
                (self.is_reversed, self.offset) = (false, 0);
            }
            Key::Reverse => self.is_reversed = !self.is_reversed,
            Key::Up => self.offset = self.offset.saturating_sub(1),
            Key::Down => self.offset += 1,
            Key::PageUp => self.offset = self.offset.saturating_sub(page),
            Key::PageDown => self.offset += page,
            Key::First => self.offset = 0,
            Key::Last => self.offset = last,
            Key::Quit => {}
        }
        self.offset = self.offset.min(last);
    }

    fn sort(&self, rows: &mut [Row]) {
        rows.sort_by(|a, b| {
            let order = self.sort_by.compare(a, b);
            let order = if self.is_reversed {
                order.reverse()
            } else {
                order
            };
            order.then(a.figures.rank.cmp(&b.figures.rank))
        });
    }
}

/// A job as it is shown.
#[derive(Clone, Debug)]
pub(super) struct Shown<'a> {
    /// The process of rank 0.
    pub(super) job: u32,
    pub(super) document: &'a Document,
    pub(super) rows: Vec<Row>,
    /// Why these figures are not those of now.
    pub(super) lost: Option<String>,
}

/// The lines for a terminal of this size.
pub(super) fn frame(
    mut shown: Shown<'_>,
    choice: &mut Choice,
    (width, height): (usize, usize),
) -> Vec<Line> {
    choice.sort(&mut shown.rows);
    let host_width = shown
        .rows
        .iter()
        .map(|row| row.figures.host.chars().count());
    let host_width = host_width
        .max()
        .unwrap_or(0)
        .clamp(HOST_WIDTH.0, HOST_WIDTH.1);
    let host_width = host_width.min(
        width
            .saturating_sub(FIXED_WIDTH + BAR_WIDTH.0)
            .max(HOST_WIDTH.0),
    );
    let bar_width = width.saturating_sub(FIXED_WIDTH + host_width);
    let bar_width = bar_width.clamp(BAR_WIDTH.0, BAR_WIDTH.1);
    let mut lines = vec![title(&shown)];
    lines.extend(messages(&shown));
    lines.push(legend(&shown.rows));
    lines.push(Line::of(
        Paint::Title,
        format!(
            "{:>5} {:<host_width$} {:<bar_width$} {:>5}{:>5}{:>5}{:>8}{:>9}  waits for",
            "rank", "host", "last 5 s", "comp", "comm", "wait", "awaited", "memory"
        ),
    ));
    choice.room = height.saturating_sub(lines.len() + 1);
    choice.rows = shown.rows.len();
    choice.offset = choice.offset.min(choice.rows.saturating_sub(choice.room));
    let rows = shown.rows.iter().skip(choice.offset).take(choice.room);
    lines.extend(rows.map(|row| rank_line(row, shown.document, host_width, bar_width)));
    lines.resize(height.saturating_sub(1).max(lines.len()), Line::default());
    lines.push(footer(choice));
    lines.truncate(height);
    lines.into_iter().map(|line| line.fitted(width)).collect()
}

fn title(shown: &Shown<'_>) -> Line {
    let (document, rows) = (shown.document, &shown.rows);
    let most = |get: fn(&Row) -> f64| rows.iter().map(get).fold(0.0, f64::max);
    let steps = rows.iter().map(|row| row.figures.steps).max().unwrap_or(0);
    let rate = match steps {
        0 => format!("{:.1} collectives/s", most(|row| row.rates.collectives)),
        steps => format!("step {steps} ({:.1}/s)", most(|row| row.rates.steps)),
    };
    let mut hosts: Vec<&str> = rows.iter().map(|row| &*row.figures.host).collect();
    hosts.sort_unstable();
    hosts.dedup();
    Line::of(Paint::Title, format!("job {}", shown.job)).add(
        Paint::Plain,
        format!(
            "  {} on {}, up {}, {}, {rate}",
            counted(u64::from(document.size), "rank"),
            counted(hosts.len() as u64, "host"),
            lasting(most(|row| row.figures.elapsed_seconds)),
            counted(document.restarts, "restart")
        ),
    )
}

/// The ranks that others wait for, and what else is wrong; at least one line.
fn messages(shown: &Shown<'_>) -> Vec<Line> {
    if let Some(why) = &shown.lost {
        return vec![Line::of(Paint::Alarm, why.clone())];
    }
    let mut lines: Vec<Line> = shown.document.waiting_for.iter().map(hang_line).collect();
    let silent: Vec<u32> = shown
        .rows
        .iter()
        .filter(|row| row.figures.age_seconds > OLD_S)
        .map(|row| row.figures.rank)
        .collect();
    if !silent.is_empty() {
        let text = format!("no report for more than 5 s of {}", named(&silent));
        lines.push(Line::of(Paint::Alarm, text));
    }
    if lines.is_empty() {
        lines.extend(shown.document.slow.iter().flat_map(slow_lines));
    }
    if lines.is_empty() {
        lines.push(latest_line(&shown.rows));
    }
    let stalls = shown.rows.iter().map(|row| row.figures.stalls).max();
    if let Some(stalls) = stalls.filter(|stalls| *stalls > 0) {
        lines.push(Line::of(
            Paint::Alarm,
            format!("{}, in the log of rank 0", counted(stalls, "stall warning")),
        ));
    }
    lines.truncate(MESSAGES_MAX);
    lines
}

fn hang_line(hang: &Hang) -> Line {
    let more = match hang.operations {
        0 | 1 => String::new(),
        more => format!(" and {} others", more - 1),
    };
    Line::of(
        Paint::Alarm,
        format!(
            "for {:.0} s waiting for {} to begin {:?}{more}",
            hang.seconds,
            named(&hang.ranks),
            hang.operation
        ),
    )
}

/// The slow rank, and the likely cause on a line of its own.
fn slow_lines(slow: &Slow) -> Vec<Line> {
    let (rank, cause) = slow.text.split_once(". ").unwrap_or((&slow.text, ""));
    let lines = [rank, cause].into_iter().filter(|line| !line.is_empty());
    lines.map(|line| Line::of(Paint::Alarm, line)).collect()
}

/// The rank for which the others have waited longest in the last seconds.
fn latest_line(rows: &[Row]) -> Line {
    let latest = rows
        .iter()
        .max_by(|a, b| a.rates.awaited.total_cmp(&b.rates.awaited));
    match latest.filter(|row| row.rates.awaited >= AWAITED_MIN) {
        Some(row) => Line::of(
            Paint::Plain,
            format!(
                "the others waited longest for rank {} on {}: {} of the time",
                row.figures.rank,
                row.figures.host,
                percent(row.rates.awaited)
            ),
        ),
        None => Line::of(Paint::Soft, "no rank is waited for"),
    }
}

fn legend(rows: &[Row]) -> Line {
    let mean = |get: fn(&Row) -> f64| {
        let sum: f64 = rows.iter().map(get).sum();
        percent(sum / rows.len().max(1) as f64)
    };
    Line::of(Paint::Soft, "all ranks: ")
        .add(Paint::Computing, "###")
        .add(
            Paint::Plain,
            format!(" computing {}  ", mean(|row| row.rates.computing)),
        )
        .add(Paint::Communicating, "===")
        .add(
            Paint::Plain,
            format!(" communicating {}  ", mean(|row| row.rates.communicating)),
        )
        .add(Paint::Waiting, "...")
        .add(
            Paint::Plain,
            format!(" waiting {}", mean(|row| row.rates.waiting)),
        )
}

fn rank_line(row: &Row, document: &Document, host_width: usize, bar_width: usize) -> Line {
    let Row { figures, rates } = row;
    let text = match figures.age_seconds > OLD_S {
        true => Paint::Soft,
        false => Paint::Plain,
    };
    let host: String = figures.host.chars().take(host_width).collect();
    let mut line = Line::of(text, format!("{:>5} {host:<host_width$} ", figures.rank));
    let [computing, communicating, waiting] = parts(row, bar_width);
    for (paint, sign, length) in [
        (Paint::Computing, "#", computing),
        (Paint::Communicating, "=", communicating),
        (Paint::Waiting, ".", waiting),
    ] {
        line = line.add(paint, sign.repeat(length));
    }
    line = line.add(
        text,
        format!(
            " {:>5}{:>5}{:>5}{:>8}{:>9}  ",
            percent(rates.computing),
            percent(rates.communicating),
            percent(rates.waiting),
            percent(rates.awaited),
            in_bytes(figures.memory_bytes)
        ),
    );
    match awaited_by(figures, document) {
        Some(ranks) => line.add(Paint::Alarm, ranks),
        None => line,
    }
}

/// The ranks that this one waits for now.
fn awaited_by(figures: &Figures, document: &Document) -> Option<String> {
    let mut hangs = document.waiting_for.iter();
    let hang = hangs.find(|hang| hang.waiting.contains(&figures.rank))?;
    Some(named(&hang.ranks))
}

/// Lengths of the bar's parts, which add up to its length.
fn parts(row: &Row, length: usize) -> [usize; 3] {
    let rates = &row.rates;
    let place = |share: f64| (share * length as f64).round() as usize;
    let first = place(rates.computing).min(length);
    let second = place(rates.computing + rates.communicating).clamp(first, length);
    match rates.computing + rates.communicating + rates.waiting > 0.0 {
        true => [first, second - first, length - second],
        false => [0, 0, 0],
    }
}

fn footer(choice: &Choice) -> Line {
    let last = (choice.offset + choice.room).min(choice.rows);
    let order = if choice.is_reversed { ", reversed" } else { "" };
    Line::of(
        Paint::Soft,
        format!(
            "q quit  s sort: {}{order}  r reverse  PgUp PgDn  {}-{last} of {}",
            choice.sort_by.name(),
            (choice.offset + 1).min(choice.rows),
            choice.rows
        ),
    )
}

fn named(ranks: &[u32]) -> String {
    let names: Vec<String> = ranks.iter().take(NAMED_MAX).map(u32::to_string).collect();
    let more = match ranks.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let ranks = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{ranks} {}{more}", names.join(", "))
}

fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

fn lasting(seconds: f64) -> String {
    let whole = seconds as u64;
    match whole {
        0..100 => format!("{whole} s"),
        100..6000 => format!("{} min {} s", whole / 60, whole % 60),
        _ => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
    }
}

#[cfg(test)]
mod tests;
