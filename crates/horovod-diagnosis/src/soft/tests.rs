//! Quick questions: when they are asked, and what releases a soft wait.

use horovod_protocol::ProcessSetId;

use super::*;

/// Requests and waits of the ranks, soft ones included: the true ones, and the coordinator's view.
#[derive(Clone, Default)]
struct World {
    size: u32,
    /// Number, name, who has asked for it.
    pending: Vec<(u64, &'static str, Vec<u32>)>,
    /// Asked for, but the coordinator has not heard of it.
    soft_waits: Vec<(&'static str, u32)>,
    hard: Vec<(u32, &'static str)>,
    soft: Vec<(u32, &'static str)>,
    /// One of its threads computes, whatever the others wait for.
    computes: Option<u32>,
    polls: usize,
}

impl Requests for World {
    fn lacks_any(&mut self, ranks: &BTreeSet<Rank>) -> bool {
        let requests = self.incomplete();
        self.polls += 1;
        requests
            .iter()
            .any(|(_, r)| r.missing.iter().any(|rank| ranks.contains(rank)))
    }

    fn incomplete(&mut self) -> Vec<(u64, StalledRequest)> {
        let request = |(number, name, who): &(u64, &str, Vec<u32>)| {
            let missing = (0..self.size).filter(|r| !who.contains(r));
            let request = StalledRequest {
                set: ProcessSetId(0),
                name: Arc::from(*name),
                waiting: who.iter().copied().map(Rank).collect(),
                missing: missing.map(Rank).collect(),
                waited_ns: 1,
            };
            (*number, request)
        };
        self.pending.iter().map(request).collect()
    }
}

impl World {
    fn new(size: u32, pending: &[(&'static str, &[u32])]) -> Self {
        let pending = (1..)
            .zip(pending)
            .map(|(n, (name, who))| (n, *name, who.to_vec()));
        Self {
            size,
            pending: pending.collect(),
            ..Self::default()
        }
    }

    fn hard(mut self, waits: &[(u32, &'static str)]) -> Self {
        self.hard = waits.to_vec();
        self
    }

    fn soft(mut self, waits: &[(u32, &'static str)]) -> Self {
        self.soft = waits.to_vec();
        self
    }

    fn brief(&self, rank: u32, keys: &[Key]) -> Brief {
        let waits = |of: &[(u32, &'static str)], handle| {
            let mine = of.iter().filter(|(r, _)| *r == rank);
            mine.map(|(_, name)| ((0, Arc::from(*name)), handle))
                .collect::<Vec<(Key, u64)>>()
        };
        let mut waits_for = waits(&self.hard, 0);
        waits_for.extend(waits(&self.soft, 100 + u64::from(rank)));
        let has = |key: &Key| {
            self.soft_waits
                .iter()
                .any(|(name, r)| **name == *key.1 && *r == rank)
                || self
                    .pending
                    .iter()
                    .any(|(_, name, who)| **name == *key.1 && who.contains(&rank))
        };
        Brief {
            blocked: !waits_for.is_empty() && self.computes != Some(rank),
            waits_for,
            pending: keys.iter().map(has).collect(),
        }
    }
}

/// Let the watch look while `world` stands still, for so long: who was let go at first, why, and how many ranks
/// were asked.
fn watch(world: &mut World, until_ms: u64) -> (Vec<(u32, u64)>, Option<String>, usize) {
    run(&mut SoftWatch::default(), world, until_ms, |_, _| {})
}

fn run(
    watch: &mut SoftWatch,
    world: &mut World,
    until_ms: u64,
    mut between: impl FnMut(usize, &mut World),
) -> (Vec<(u32, u64)>, Option<String>, usize) {
    for (rank, _) in world.soft.clone() {
        watch.notice(0, Rank(rank), true);
    }
    let (mut asked, mut questions, mut now) = (0, 0, 0);
    while let Some(at) = watch.deadline().filter(|at| *at <= until_ms * MS) {
        now = at.max(now);
        match watch.poll(now, world) {
            Some(SoftStep::Ask { question, ranks }) => {
                for (rank, keys) in ranks {
                    asked += 1;
                    watch.answered(question, rank, world.brief(rank.0, &keys));
                }
                questions += 1;
                between(questions, world);
            }
            Some(SoftStep::LetGo(ends)) => {
                let why = ends.first().map(|e| format!("{} {}", e.waits.0, e.name));
                return (
                    ends.iter().map(|e| (e.rank.0, e.handle)).collect(),
                    why,
                    asked,
                );
            }
            None => {}
        }
    }
    (Vec::new(), None, asked)
}

#[test]
fn a_rank_that_skips_its_backward_pass_and_waits_for_a_metric() {
    let mut world = World::new(3, &[("presence", &[0, 2]), ("metric", &[1])])
        .hard(&[(1, "metric")])
        .soft(&[(0, "presence"), (2, "presence")]);
    let (ends, why, asked) = watch(&mut world, 1);
    assert_eq!(ends, [(0, 100), (2, 102)]);
    assert_eq!(why.as_deref(), Some("1 metric"));
    assert_eq!(asked, 6, "three, twice");
}

#[test]
fn two_models_in_other_orders_need_the_fewest_to_leave() {
    let mut world =
        World::new(3, &[("a", &[0, 2]), ("b", &[1])]).soft(&[(0, "a"), (1, "b"), (2, "a")]);
    assert_eq!(watch(&mut world, 1).0, [(1, 101)]);
}

#[test]
fn a_rank_that_holds_up_nobody_stays() {
    let mut world = World::new(3, &[("presence", &[0, 2]), ("metric", &[1, 2])])
        .hard(&[(1, "metric")])
        .soft(&[(0, "presence"), (2, "presence")]);
    assert_eq!(watch(&mut world, 1).0, [(0, 100)]);
}

#[test]
fn over_several_ranks() {
    // 0 softly for a, which lacks 1; that for b, which lacks 2; that for c, which lacks 0.
    let mut world = World::new(
        4,
        &[("a", &[0, 2, 3]), ("b", &[1, 0, 3]), ("c", &[2, 1, 3])],
    )
    .hard(&[(1, "b"), (2, "c")])
    .soft(&[(0, "a")]);
    let (ends, why, _) = watch(&mut world, 1);
    assert_eq!((ends, why.as_deref()), (vec![(0, 100)], Some("2 c")));
}

#[test]
fn a_circle_without_a_soft_wait_and_a_slow_rank_are_left_alone() {
    // 0 and 1 wait for each other for good; 2 could leave, but that helps nobody.
    let mut world = World::new(3, &[("x", &[0]), ("y", &[1]), ("a", &[2])])
        .hard(&[(0, "x"), (1, "y")])
        .soft(&[(2, "a")]);
    assert_eq!(watch(&mut world, 5000).0, []);
    // 1 computes, and has said something that it does not wait for.
    let mut world = World::new(2, &[("presence", &[0]), ("metric", &[1])]).soft(&[(0, "presence")]);
    let (ends, _, asked) = watch(&mut world, 1000);
    assert_eq!(ends, []);
    assert!(asked <= 24, "less and less often: {asked}");
    // 1 waits for something that may go on: 2 is yet to come.
    let mut world = World::new(3, &[("presence", &[0, 2]), ("metric", &[0, 1])])
        .hard(&[(1, "metric")])
        .soft(&[(0, "presence")]);
    assert_eq!(watch(&mut world, 1000).0, []);
}

#[test]
fn while_a_rank_is_merely_slow_nobody_is_asked() {
    let mut world = World::new(4, &[("g", &[0, 1, 2]), ("presence", &[0, 1, 2])]).soft(&[
        (0, "presence"),
        (1, "presence"),
        (2, "presence"),
    ]);
    let mut soft = SoftWatch::default();
    assert_eq!(run(&mut soft, &mut world, 60_000, |_, _| {}).2, 0);
    assert_eq!(world.polls, 1);
    assert_eq!(soft.deadline(), None, "until something comes");
    soft.has_news();
    assert_eq!(soft.deadline(), Some(2 * POLL_INTERVAL));
    for rank in 0..3 {
        soft.notice(0, Rank(rank), false);
    }
    assert!(soft.deadline().is_none() && !soft.is_active());
}

#[test]
fn what_is_on_its_way_or_changes_between_the_questions_proves_nothing() {
    let circle = World::new(2, &[("presence", &[0]), ("metric", &[1])])
        .hard(&[(1, "metric")])
        .soft(&[(0, "presence")]);
    // Rank 1 has asked for the gradients, too, only nobody has heard of it.
    let mut soft_waits = circle.clone();
    soft_waits.soft_waits.push(("presence", 1));
    assert_eq!(watch(&mut soft_waits, 1000).0, []);
    let mut soft_waits = circle.clone();
    soft_waits.soft_waits.push(("metric", 0));
    assert_eq!(watch(&mut soft_waits, 1000).0, []);
    // The metric ended in between, and this is the next one.
    let mut soft = SoftWatch::default();
    let again = |_: usize, world: &mut World| world.pending[1].0 += 1;
    assert_eq!(run(&mut soft, &mut circle.clone(), 1000, again).0, []);
    // It goes on once that is no longer so.
    let mut soft = SoftWatch::default();
    let once = |n: usize, world: &mut World| {
        if n == 4 {
            world.soft_waits.clear();
        }
    };
    let mut soft_waits = circle;
    soft_waits.soft_waits.push(("presence", 1));
    assert_eq!(run(&mut soft, &mut soft_waits, 1000, once).0, [(0, 100)]);
}

#[test]
fn a_rank_of_which_one_thread_may_go_on_does_not_stand_still() {
    let mut world = World::new(2, &[("presence", &[0]), ("metric", &[1]), ("other", &[1])])
        .hard(&[(1, "metric"), (1, "unknown")])
        .soft(&[(0, "presence")]);
    assert_eq!(watch(&mut world, 1000).0, []);
}

#[test]
fn a_rank_with_a_thread_that_computes_may_still_ask_for_what_the_others_lack() {
    let mut world = World::new(3, &[("presence", &[0, 2]), ("metric", &[1])])
        .hard(&[(1, "metric")])
        .soft(&[(0, "presence"), (2, "presence")]);
    world.computes = Some(1);
    assert_eq!(watch(&mut world, 60_000).0, []);
    world.computes = None;
    assert_eq!(watch(&mut world, 1).0, [(0, 100), (2, 102)]);
}

#[test]
fn many_ranks_that_all_hold_up_one_are_let_go_together() {
    let others: Vec<u32> = (0..100).filter(|r| *r != 70).collect();
    let mut world =
        World::new(100, &[("presence", &others), ("metric", &[70])]).hard(&[(70, "metric")]);
    world.soft = others.iter().map(|r| (*r, "presence")).collect();
    let (ends, _, asked) = watch(&mut world, 1);
    assert_eq!(ends.len(), 99);
    assert!(asked <= ASKED_PER_REQUEST_MAX + 1 + 100, "{asked}");
}

#[test]
fn no_answer_is_not_waited_for_long() {
    let mut soft = SoftWatch::default();
    let mut world = World::new(2, &[("presence", &[0]), ("metric", &[1])])
        .hard(&[(1, "metric")])
        .soft(&[(0, "presence")]);
    soft.notice(0, Rank(0), true);
    let Some(SoftStep::Ask { question, .. }) = soft.poll(POLL_INTERVAL, &mut world) else {
        panic!("a question");
    };
    soft.answered(question, Rank(0), world.brief(0, &[]));
    assert_eq!(soft.deadline(), Some(POLL_INTERVAL + ANSWERS_TIMEOUT));
    assert_eq!(soft.poll(POLL_INTERVAL + ANSWERS_TIMEOUT, &mut world), None);
    assert_eq!(
        soft.deadline(),
        Some(POLL_INTERVAL + ANSWERS_TIMEOUT + PAUSE)
    );
}
