//! Frames of made figures, as text.

use super::super::document::Rates;
use super::*;

/// The page with a frame of four ranks.
const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/watching.md");

/// Ranks of two hosts. The last one is slow: the others wait for it.
fn rows(count: u32) -> Vec<Row> {
    let row = |rank: u32| {
        let is_slow = rank + 1 == count;
        let waiting = if is_slow { 0.02 } else { 0.24 };
        Row {
            figures: Figures {
                rank,
                host: format!("node-{}", 1 + rank * 2 / count),
                elapsed_seconds: 725.0,
                steps: 1200,
                memory_bytes: (u64::from(rank) + 20) << 26,
                ..Figures::default()
            },
            rates: Rates {
                computing: 0.9 - waiting,
                communicating: 0.1,
                waiting,
                awaited: if is_slow { 0.21 } else { 0.0 },
                steps: 1.7,
                collectives: 12.0,
            },
        }
    };
    (0..count).map(row).collect()
}

fn shown(document: &Document) -> Shown<'_> {
    Shown {
        job: 4711,
        document,
        rows: rows(document.size),
        lost: None,
    }
}

fn document(size: u32) -> Document {
    Document {
        size,
        restarts: 1,
        ..Document::default()
    }
}

fn text(lines: &[Line]) -> String {
    let line = |line: &Line| line.0.iter().map(|(_, text)| &**text).collect::<String>();
    let lines: Vec<String> = lines
        .iter()
        .map(|l| line(l).trim_end().to_owned())
        .collect();
    lines.join("\n")
}

fn hang() -> Hang {
    Hang {
        ranks: vec![3],
        waiting: vec![0, 1, 2],
        seconds: 12.3,
        operation: "grad/7".into(),
        operations: 32,
    }
}

#[test]
fn the_page_shows_a_frame_as_it_is() {
    let document = document(4);
    let lines = frame(shown(&document), &mut Choice::default(), (80, 24));
    let text = text(&lines);
    let (rows, footer) = text.split_at(text.find("\n\n").expect("empty rows"));
    let snapshot = format!("{rows}\n{}\n", footer.trim_start_matches('\n'));
    let page = std::fs::read_to_string(PAGE).expect("the page");
    assert!(
        page.contains(&snapshot),
        "docs/watching.md should have\n{snapshot}"
    );
}

#[test]
fn every_line_fits_a_terminal_of_any_size() {
    for count in [1, 4, 256] {
        let mut document = document(count);
        document.waiting_for = vec![hang(); 8];
        for size in [(80, 24), (200, 60), (40, 10), (10, 3), (1, 1), (0, 0)] {
            let lines = frame(shown(&document), &mut Choice::default(), size);
            assert!(lines.len() <= size.1, "{size:?}: {} lines", lines.len());
            for line in &lines {
                let length: usize = line.0.iter().map(|(_, text)| text.chars().count()).sum();
                assert!(length <= size.0, "{size:?}: {line:?}");
            }
        }
    }
}

#[test]
fn a_hang_names_the_ranks_and_marks_the_rows_that_wait() {
    let mut document = document(4);
    document.waiting_for = vec![hang()];
    let text = text(&frame(shown(&document), &mut Choice::default(), (80, 24)));
    assert!(
        text.contains("\nfor 12 s waiting for rank 3 to begin \"grad/7\" and 31 others\n"),
        "{text}"
    );
    let waits = text.lines().filter(|line| line.ends_with("  rank 3"));
    assert_eq!(waits.count(), 3, "{text}");
}

#[test]
fn of_256_ranks_all_are_reached_by_scrolling() {
    let document = document(256);
    let mut choice = Choice::default();
    let mut draw = |key: Option<Key>| {
        if let Some(key) = key {
            choice.take(key);
        }
        text(&frame(shown(&document), &mut choice, (80, 24)))
    };
    let first = draw(None);
    assert!(
        first.contains("\n    0 node-1 ") && first.ends_with("1-19 of 256"),
        "{first}"
    );
    let last = draw(Some(Key::Last));
    assert!(
        last.contains("\n  255 node-2 ") && last.ends_with("238-256 of 256"),
        "{last}"
    );
    assert_eq!(draw(Some(Key::Down)), last);
    assert!(draw(Some(Key::PageUp)).ends_with("219-237 of 256"));
    assert!(draw(Some(Key::Up)).ends_with("218-236 of 256"));
    assert_eq!(draw(Some(Key::First)), first);
}

#[test]
fn a_key_changes_the_column_by_which_ranks_are_sorted() {
    let document = document(4);
    let mut choice = Choice::default();
    let mut first_after = |key: Key| {
        choice.take(key);
        let text = text(&frame(shown(&document), &mut choice, (80, 24)));
        let row = text.lines().nth(4).expect("a row").to_owned();
        let rank = row.split_whitespace().next().expect("a rank").to_owned();
        (rank, text)
    };
    let (rank, text) = first_after(Key::Sort);
    assert!(rank == "3" && text.contains("s sort: awaited  "), "{text}");
    let (rank, text) = first_after(Key::Reverse);
    assert!(
        rank == "0" && text.contains("sort: awaited, reversed"),
        "{text}"
    );
    let (rank, text) = first_after(Key::Sort);
    assert!(rank == "0" && text.contains("s sort: waiting  "), "{text}");
}

#[test]
fn names_cannot_move_the_cursor() {
    let mut document = document(1);
    document.waiting_for = vec![Hang {
        ranks: vec![0],
        ..Hang::default()
    }];
    let mut shown = shown(&document);
    shown.rows[0].figures.host = "a\x1b[2Jb".into();
    let text = text(&frame(shown, &mut Choice::default(), (80, 24)));
    assert!(!text.contains('\x1b') && text.contains("a?[2Jb"), "{text}");
}

#[test]
fn a_job_that_does_not_answer_is_said_so() {
    let document = document(2);
    let mut shown = shown(&document);
    shown.lost = Some("the job has ended".into());
    let text = text(&frame(shown, &mut Choice::default(), (80, 24)));
    assert_eq!(text.lines().nth(1), Some("the job has ended"));
}

#[test]
fn a_slow_rank_and_the_likely_cause_are_two_lines() {
    let text_of_slow = "rank 3 on node-2 is slow: the others lose 21 % of their time by waiting. Likely cause: input. \
                        Waiting for data takes 40 % of the time there, 1 % elsewhere.";
    let document = Document {
        slow: Some(Slow {
            text: text_of_slow.into(),
        }),
        ..document(4)
    };
    let frame = text(&frame(shown(&document), &mut Choice::default(), (100, 24)));
    let lines: Vec<&str> = frame.lines().collect();
    assert_eq!(
        lines[1..3],
        [
            "rank 3 on node-2 is slow: the others lose 21 % of their time by waiting",
            "Likely cause: input. Waiting for data takes 40 % of the time there, 1 % elsewhere."
        ],
        "{frame}"
    );
}
