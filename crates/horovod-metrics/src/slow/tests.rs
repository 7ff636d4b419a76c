//! Made jobs: how long each rank computes in a step decides who waits for whom.

use super::*;

const MS: u64 = 1_000_000;

/// A job. In each step all other ranks wait for the slowest one.
struct Job {
    rows: Sample,
    marks_steps: bool,
}

/// A rank's part of a step, in milliseconds.
#[derive(Clone, Copy, Default)]
struct Part {
    computing: u64,
    input: u64,
    /// Processor time; the process runs all the time if this is `None`.
    cpu: Option<u64>,
    /// Its messages travel for so long.
    delay: u64,
}

fn computing(ms: u64) -> Part {
    Part {
        computing: ms,
        ..Part::default()
    }
}

impl Job {
    fn new(hosts: &[u32]) -> Self {
        let row = |(rank, host): (usize, &u32)| Row {
            rank: rank as u32,
            host: *host,
            hostname: format!("node-{host}").into(),
            figures: RankFigures::default(),
            of_host: (rank == 0 || hosts[rank - 1] != *host).then(|| HostFigures {
                processors: 4,
                memory: 100 << 30,
                available: 50 << 30,
                ..HostFigures::default()
            }),
        };
        Self {
            rows: hosts.iter().enumerate().map(row).collect(),
            marks_steps: true,
        }
    }

    /// All ranks make a step; the last of them to send determines its end.
    fn step(&mut self, parts: &[Part]) {
        let sent: Vec<u64> = parts.iter().map(|p| p.computing + p.delay).collect();
        let end = sent.iter().max().copied().unwrap_or(0);
        let last = sent.iter().position(|at| *at == end).unwrap_or(0);
        let second = sent.iter().enumerate().filter(|(i, _)| *i != last);
        let second = second.map(|(_, at)| *at).max().unwrap_or(0);
        for (rank, (row, part)) in self.rows.iter_mut().zip(parts).enumerate() {
            let f = &mut row.figures;
            f.elapsed += (end + 1) * MS;
            f.computing += part.computing * MS;
            f.communicating += MS;
            f.waiting += (end - part.computing) * MS;
            f.input += part.input * MS;
            f.cpu += part.cpu.unwrap_or(part.computing) * MS;
            f.collectives += 1;
            f.steps += u64::from(self.marks_steps);
            if rank == last {
                f.awaited += (end - second) * MS;
                f.last += 1;
            }
        }
    }

    /// Runs so many seconds and observes once a second.
    fn run(&mut self, slow: &mut SlowRanks, seconds: u64, mut parts: impl FnMut(u64) -> Vec<Part>) {
        let begin = self.rows[0].figures.elapsed;
        let (mut step, mut observed) = (0, 0);
        while observed < seconds {
            self.step(&parts(step));
            step += 1;
            let now = (self.rows[0].figures.elapsed - begin) / SECOND_NS;
            for _ in observed..now.min(seconds) {
                slow.observe(self.rows.clone());
            }
            observed = observed.max(now);
        }
    }

    /// The rank that is named after a minute of such steps.
    fn named(mut self, parts: &[Part]) -> Option<Slow> {
        let mut slow = SlowRanks::default();
        self.run(&mut slow, 60, |_| parts.to_vec());
        slow.named().cloned()
    }
}

#[test]
fn the_rank_that_computes_longer_is_named_with_the_loss_of_the_others() {
    let slow = Job::new(&[0, 0, 1, 1])
        .named(&[computing(80), computing(80), computing(80), computing(100)])
        .expect("a slow rank");
    assert_eq!((&*slow.ranks, &*slow.host), (&[3][..], "node-1"));
    assert!((slow.lost - 20.0 / 101.0).abs() < 0.01, "{slow:?}");
    assert!(slow.explained > 0.99 && slow.steps >= STEPS, "{slow:?}");
    assert!(
        slow.to_string()
            .starts_with("rank 3 on node-1 is slow: the others lose 20 % of their time by waiting, over the last "),
        "{slow}"
    );
    assert!(
        slow.to_string().ends_with(
            " steps. Likely cause: more work, or slower hardware. Computing takes 99 % of the time there, 79 % elsewhere."
        ),
        "{slow}"
    );
}

#[test]
fn marked_input_is_the_cause() {
    let mut parts = [computing(80); 3];
    parts[1] = Part {
        computing: 120,
        input: 60,
        cpu: Some(60),
        ..Part::default()
    };
    let slow = Job::new(&[0, 0, 0]).named(&parts).expect("a slow rank");
    assert_eq!((&*slow.ranks, slow.cause.name()), (&[1][..], "input"));
}

#[test]
fn a_process_that_does_not_run_waits_for_something() {
    let mut parts = [computing(80); 2];
    parts[1] = Part {
        computing: 120,
        cpu: Some(40),
        ..Part::default()
    };
    let slow = Job::new(&[0, 0]).named(&parts).expect("a slow rank");
    assert_eq!(slow.cause.name(), "not_running");
}

#[test]
fn a_loaded_host_is_no_reason_why_one_of_its_ranks_is_slow() {
    let part = |computing| Part {
        computing,
        cpu: Some(computing / 4),
        ..Part::default()
    };
    let slow = Job::new(&[0, 0])
        .named(&[part(80), part(120)])
        .expect("a slow rank");
    assert_eq!(slow.cause.name(), "computing");
}

/// A minute of a job whose rank 1 is slow on a host that changes by `change` in each step.
fn on_a_host_that(change: fn(&mut HostFigures), cpu: u64) -> &'static str {
    let mut job = Job::new(&[0, 1]);
    let mut slow = SlowRanks::default();
    for _ in 0..60 {
        for _ in 0..8 {
            let part = Part {
                computing: 120,
                cpu: Some(cpu),
                ..Part::default()
            };
            job.step(&[computing(80), part]);
            for row in &mut job.rows {
                let (rank, figures) = (row.rank, &row.figures);
                let host = row.of_host.as_mut().expect("a rank for each host");
                host.busy = host.busy.max(figures.cpu);
                if rank == 1 {
                    change(host);
                }
            }
        }
        slow.observe(job.rows.clone());
    }
    slow.named().expect("a slow rank").cause.name()
}

#[test]
fn the_host_may_be_the_cause() {
    assert_eq!(on_a_host_that(|_| {}, 120), "computing");
    assert_eq!(on_a_host_that(|host| host.steal += 121 * MS, 60), "steal");
    assert_eq!(
        on_a_host_that(|host| host.available = 1 << 30, 60),
        "memory"
    );
    assert_eq!(on_a_host_that(|host| host.swapped += 1 << 20, 60), "memory");
    assert_eq!(
        on_a_host_that(|host| host.busy += 121 * MS, 60),
        "other_processes"
    );
}

#[test]
fn messages_that_come_late_are_the_network_of_their_host() {
    let late = Part {
        delay: 30,
        ..computing(80)
    };
    let slow = Job::new(&[0, 1])
        .named(&[computing(80), late])
        .expect("a slow rank");
    assert_eq!((&*slow.ranks, slow.cause.name()), (&[1][..], "network"));
}

/// A delayed network brings results late, too. Then other ranks are the last ones now and then, for a short time.
#[test]
fn late_messages_are_named_if_others_are_last_at_times() {
    let mut job = Job::new(&[0, 1, 2]);
    let mut slow = SlowRanks::default();
    let late = Part {
        delay: 30,
        ..computing(80)
    };
    job.run(&mut slow, 60, |step| {
        if step % 4 == 0 {
            vec![computing(82), computing(80), computing(80)]
        } else {
            vec![computing(80), computing(80), late]
        }
    });
    let slow = slow.named().expect("a slow rank");
    assert_eq!((&*slow.ranks, slow.cause.name()), (&[2][..], "network"));
}

#[test]
fn ranks_of_a_host_that_are_late_together_name_the_host() {
    let parts = [computing(80), computing(80), computing(120), computing(120)];
    let slow = Job::new(&[0, 0, 1, 1]).named(&parts).expect("a slow host");
    assert_eq!(&*slow.ranks, &[2, 3]);
    assert!(
        slow.to_string().starts_with(
            "the 2 ranks on node-1 are slow: the others lose 33 % of their time by waiting"
        ),
        "{slow}"
    );
}

#[test]
fn two_slow_hosts_hide_each_other() {
    let slow = computing(120);
    let parts = [computing(80), computing(80), slow, slow, slow, slow];
    assert_eq!(Job::new(&[0, 0, 1, 1, 2, 2]).named(&parts), None);
}

#[test]
fn a_shortage_of_the_only_host_is_no_reason_why_one_of_its_ranks_is_slow() {
    let mut job = Job::new(&[0, 0]);
    let mut slow = SlowRanks::default();
    for _ in 0..60 {
        for _ in 0..8 {
            job.step(&[computing(80), computing(120)]);
            if let Some(host) = &mut job.rows[0].of_host {
                host.steal += 121 * MS;
                host.available = 0;
            }
        }
        slow.observe(job.rows.clone());
    }
    assert_eq!(
        slow.named().map(|slow| slow.cause.name()),
        Some("computing")
    );
}

/// While no step ends, samples become rare.
#[test]
fn after_a_long_pause_a_slow_rank_is_named() {
    let (mut job, mut slow) = (Job::new(&[0, 0]), SlowRanks::default());
    job.run(&mut slow, 30, |_| vec![computing(100); 2]);
    for _ in 0..300 {
        job.rows
            .iter_mut()
            .for_each(|row| row.figures.elapsed += SECOND_NS);
        slow.observe(job.rows.clone());
    }
    job.run(&mut slow, 90, |_| vec![computing(100), computing(150)]);
    assert!(slow.named().is_some());
}

#[test]
fn ranks_that_take_turns_for_half_a_minute_are_each_reported_once() {
    let (mut job, mut slow) = (Job::new(&[0, 0]), SlowRanks::default());
    let mut reports = Vec::new();
    for second in 0..300 {
        let is_first = second / 30 % 2 == 0;
        for _ in 0..8 {
            let times = if is_first { [120, 80] } else { [80, 120] };
            job.step(&times.map(computing));
        }
        reports.extend(
            slow.observe(job.rows.clone())
                .map(|slow| slow.ranks.clone()),
        );
    }
    assert_eq!(reports, [[0], [1]]);
}

#[test]
fn two_slow_ranks_of_one_host_are_not_told_apart() {
    let parts = [computing(80), computing(80), computing(120), computing(120)];
    assert_eq!(Job::new(&[0, 0, 0, 0]).named(&parts), None);
}

#[test]
fn a_loss_that_hardly_matters_names_no_rank() {
    assert_eq!(
        Job::new(&[0, 0]).named(&[computing(100), computing(104)]),
        None
    );
}

#[test]
fn one_long_step_names_no_rank() {
    let (mut job, mut slow) = (Job::new(&[0, 0]), SlowRanks::default());
    job.run(&mut slow, 40, |step| {
        let save = if step == 200 { 15_000 } else { 0 };
        vec![computing(100 + save), computing(100)]
    });
    for _ in 0..30 {
        job.run(&mut slow, 1, |_| vec![computing(100), computing(100)]);
        assert_eq!(slow.named(), None);
    }
}

#[test]
fn ranks_that_are_slow_in_turn_are_not_named() {
    let (mut job, mut slow) = (Job::new(&[0, 0, 0]), SlowRanks::default());
    job.run(&mut slow, 120, |step| {
        let mut parts = vec![computing(100); 3];
        parts[step as usize % 3] = computing(150);
        parts
    });
    assert_eq!(slow.named(), None);
}

#[test]
fn a_rank_that_has_recovered_is_soon_not_named() {
    let (mut job, mut slow) = (Job::new(&[0, 0]), SlowRanks::default());
    job.run(&mut slow, 30, |_| vec![computing(100), computing(150)]);
    assert!(slow.named().is_some());
    job.run(&mut slow, 20, |_| vec![computing(100), computing(100)]);
    assert_eq!(slow.named(), None);
}

#[test]
fn a_rank_is_reported_once() {
    let (mut job, mut slow) = (Job::new(&[0, 0]), SlowRanks::default());
    let mut reports = 0;
    for _ in 0..60 {
        for _ in 0..8 {
            job.step(&[computing(80), computing(120)]);
        }
        reports += usize::from(slow.observe(job.rows.clone()).is_some());
    }
    assert_eq!(reports, 1);
}

#[test]
fn steps_of_minutes_are_compared_too_and_little_is_kept() {
    let (mut job, mut slow) = (Job::new(&[0, 0]), SlowRanks::default());
    job.run(&mut slow, 3_000, |_| {
        vec![computing(60_000), computing(90_000)]
    });
    let named = slow.named().expect("a slow rank");
    assert_eq!(&*named.ranks, &[1]);
    assert!(slow.samples.len() <= SAMPLES_MAX);
}

#[test]
fn without_marks_half_a_minute_is_compared() {
    let mut job = Job::new(&[0, 0]);
    job.marks_steps = false;
    let mut slow = SlowRanks::default();
    job.run(&mut slow, 29, |_| vec![computing(100), computing(150)]);
    assert_eq!(slow.named(), None);
    job.run(&mut slow, 10, |_| vec![computing(100), computing(150)]);
    assert_eq!(slow.named().map(|slow| slow.steps), Some(0));
}

#[test]
fn one_rank_alone_and_ranks_without_reports_are_no_fault() {
    assert_eq!(Job::new(&[0]).named(&[computing(100)]), None);
    let mut slow = SlowRanks::default();
    let job = Job::new(&[0, 0]);
    for ranks in [0, 1, 2, 1] {
        for _ in 0..40 {
            assert_eq!(slow.observe(job.rows[..ranks].to_vec()), None);
        }
    }
}

/// Hosts of the ranks of balanced jobs.
const HOSTS: [&[u32]; 5] = [&[0, 0], &[0, 1], &[0, 1, 1], &[0, 0, 0, 1], &[0, 0, 1, 1]];

/// In a balanced job each rank's time varies, here by a factor of three, and no rank is named.
#[test]
fn balanced_jobs_name_no_rank() {
    let mut random = 1_u64;
    let mut next = move || {
        // Knuth's generator (MMIX); the upper bits are the random ones.
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        50 + (random >> 33) % 100
    };
    let mut named = Vec::new();
    for steps_of_a_second in [1, 2, 5, 20] {
        for hosts in HOSTS.iter().cycle().take(100) {
            let (mut job, mut slow) = (Job::new(hosts), SlowRanks::default());
            for _ in 0..200 {
                for _ in 0..steps_of_a_second {
                    let ranks = hosts
                        .iter()
                        .map(|_| computing(next() * 10 / steps_of_a_second));
                    job.step(&ranks.collect::<Vec<_>>());
                }
                named.extend(
                    slow.observe(job.rows.clone())
                        .map(|slow| (steps_of_a_second, *hosts, slow.to_string())),
                );
            }
        }
    }
    assert!(named.is_empty(), "{} of 400: {named:#?}", named.len());
}
