//! The comparison of the ranks before an operation of a framework.

use crate::ReduceOp;
use crate::framework::{Lines, Obstacle, Settings, difference_text, mistake_text, optimizer_line};
use crate::testing::{on_ranks, process_set};

fn lines(lines: &[&str]) -> Lines {
    Lines::new(lines.iter().map(|line| (*line).to_owned()).collect())
}

/// The text of an obstacle in which ranks differ.
fn text(found: Option<Obstacle>) -> String {
    match found {
        Some(Obstacle::Differ(sides)) => difference_text(&sides),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_mistake_reaches_all_ranks_before_a_difference_does() {
    on_ranks(3, |hvd| {
        // Ranks 1 and 2 make one; the first is told.
        let mistake = (hvd.rank() > 0).then(|| format!("the mistake of {}", hvd.rank()));
        let own = lines(&[&format!("rate\t{}", hvd.rank())]);
        let found = own.compare(hvd, "x", None, mistake).unwrap();
        let expected = Obstacle::Mistake(1, "the mistake of 1".into());
        assert_eq!(found, Some(expected));

        let set = process_set(hvd, &[0, 2]).unwrap();
        if let Some(hvd) = set.communicator() {
            let mistake = (hvd.rank() == 1).then(|| "of the last".to_owned());
            let found = lines(&[]).compare(hvd, "x", None, mistake).unwrap();
            assert_eq!(found, Some(Obstacle::Mistake(2, "of the last".into())));
        }

        let found = lines(&["rate\t1"]).compare(hvd, "x", Some("step\t2"), None);
        assert_eq!(found.unwrap(), None);
    });
    on_ranks(1, |hvd| {
        let found = lines(&[]).compare(hvd, "x", None, Some("alone".into()));
        let Some(Obstacle::Mistake(rank, mistake)) = found.unwrap() else {
            panic!("no mistake");
        };
        let text = mistake_text(rank, &mistake);
        assert_eq!(text, "rank 0 cannot take part in this call: alone");
    });
}

#[test]
fn another_optimizer_is_told_before_all_that_follows_from_it() {
    on_ranks(2, |hvd| {
        let numbers = [(); 2].map(|()| optimizer_line(hvd));
        let own = |number: usize| lines(&["\"a\"\tof shape [1]", &numbers[number]]);
        let rate = format!("learning rate\t{}", hvd.rank());
        let found = own(hvd.rank()).compare(hvd, "x", Some(&rate), None);
        let text_of = text(found.unwrap());
        assert!(
            text_of.contains(
                "rank 0 reduces for optimizer number 0 in the order in which it made them, rank 1 for optimizer number 1 in"
            ),
            "{text_of}"
        );

        // One rank broadcasts parameters while the other steps.
        let parameters = lines(&["\"a\"\tof shape [1]"]);
        let own = if hvd.rank() == 1 { own(0) } else { parameters };
        let text_of = text(own.compare(hvd, "x", None, None).unwrap());
        assert!(
            text_of.contains("rank 0 reduces for no optimizer, rank 1 for optimizer number 0"),
            "{text_of}"
        );
    });
}

#[test]
fn a_line_on_one_side_alone_is_not_called_a_parameter() {
    on_ranks(2, |hvd| {
        let rate = (hvd.rank() == 0).then_some("learning rate\t0.5");
        let found = lines(&["op\tSum"]).compare(hvd, "x", rate, None);
        let text_of = text(found.unwrap());
        assert!(
            text_of.contains("rank 0 has learning rate 0.5, rank 1 has nothing of that name"),
            "{text_of}"
        );
        let own = ["\"b\"\tof shape [1]", "\"a\"\tof shape [2]"];
        let own = lines(&own[..=hvd.rank()]);
        let text_of = text(own.compare(hvd, "x", None, None).unwrap());
        assert!(
            text_of.contains("rank 1 has \"a\" of shape [2], rank 0 has nothing of that name"),
            "{text_of}"
        );
    });
}

#[test]
fn settings_are_checked_and_each_has_a_line() {
    let with = |set: fn(&mut Settings)| {
        let mut settings = Settings::default();
        set(&mut settings);
        settings
    };
    assert_eq!(Settings::default().check(), Ok(()));
    for (wrong, mistake) in [
        (with(|set| set.groups = 0), "groups was set to 0"),
        (
            with(|set| set.passes = 0),
            "backward_passes_per_step was set to 0",
        ),
        (with(|set| set.max_norm = Some(0.0)), "limited to 0"),
        (with(|set| set.max_norm = Some(f64::NAN)), "limited to NaN"),
    ] {
        let found = wrong.check().unwrap_err();
        assert!(found.contains(mistake), "{found}");
    }
    let others = [
        with(|set| set.op = ReduceOp::Sum),
        with(|set| set.groups = 2),
        with(|set| set.passes = 2),
        with(|set| set.max_norm = Some(1.0)),
    ];
    for (place, other) in others.iter().enumerate() {
        assert_eq!(other.check(), Ok(()));
        let (lines, defaults) = (other.lines(), Settings::default().lines());
        let differ: Vec<usize> = (0..lines.len())
            .filter(|at| lines[*at] != defaults[*at])
            .collect();
        assert_eq!(differ, [place]);
    }
}
