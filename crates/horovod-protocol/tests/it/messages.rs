//! Messages survive the wire, and no bytes make a decoder panic.

use horovod_protocol::*;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use std::sync::Arc;

fn rank() -> impl Strategy<Value = Rank> {
    (0..RANKS_MAX as u32).prop_map(Rank)
}

fn ascending_ranks() -> impl Strategy<Value = Vec<Rank>> {
    prop::collection::btree_set(rank(), 0..6).prop_map(|ranks| ranks.into_iter().collect())
}

fn tensors() -> impl Strategy<Value = Arc<[TensorMeta]>> {
    let shape = prop::collection::vec(any::<u64>(), 0..4);
    let tensor =
        (select(&DType::ALL), shape).prop_map(|(dtype, shape)| TensorMeta::new(dtype, shape));
    let transposed = (select(&DType::ALL), 1..9u64, 1..9u64).prop_map(|(dtype, rows, columns)| {
        let shape = [rows, columns];
        let order = MemoryOrder::of(&shape, &[1, rows as i64]).expect("column-major");
        TensorMeta::new(dtype, shape).in_order(order)
    });
    prop::collection::vec(prop_oneof![3 => tensor, 1 => transposed], 0..4).prop_map(Into::into)
}

fn reduction() -> impl Strategy<Value = (ReduceOp, Scale)> {
    let scale = prop_oneof![
        Just(Scale::NONE),
        (any::<u64>(), any::<u64>()).prop_map(|(pre, post)| Scale {
            pre: f64::from_bits(pre),
            post: f64::from_bits(post)
        }),
    ];
    let op = (0..6u8).prop_filter_map("a code", ReduceOp::from_code);
    (op, scale)
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        reduction().prop_map(|(op, scale)| Op::Allreduce { op, scale }),
        Just(Op::Allgather),
        rank().prop_map(|root| Op::Broadcast { root }),
        Just(Op::Alltoall),
        reduction().prop_map(|(op, scale)| Op::Reducescatter { op, scale }),
        Just(Op::Barrier),
        Just(Op::Join),
        prop::collection::vec(rank(), 0..5).prop_map(|ranks| Op::AddProcessSet { ranks }),
        any::<u32>().prop_map(|id| Op::RemoveProcessSet {
            set: ProcessSetId(id)
        }),
    ]
}

fn device() -> impl Strategy<Value = Device> {
    select(&[
        Device::Cpu,
        Device::Gpu,
        Device::Other(0),
        Device::Other(255),
    ])
}

fn name() -> impl Strategy<Value = Arc<str>> {
    "\\PC{0,12}".prop_map(Into::into)
}

fn run() -> impl Strategy<Value = SlotRun> {
    (0..u64::MAX / 2, 1..u32::MAX).prop_map(|(first, len)| SlotRun {
        first: Slot(first),
        len,
    })
}

fn slot() -> impl Strategy<Value = Slot> {
    (0..u64::MAX).prop_map(Slot)
}

fn dims() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(any::<u64>(), 0..5)
}

fn plain_submission() -> impl Strategy<Value = Submission> {
    let new = (any::<u64>(), name(), op(), device(), tensors());
    prop_oneof![
        run().prop_map(Submission::Hits),
        (slot(), dims()).prop_map(|(slot, first_dims)| Submission::GatherHit { slot, first_dims }),
        new.prop_map(|(set, name, op, device, tensors)| Submission::New {
            set: SetKey(set),
            name,
            signature: Arc::new(RequestSignature {
                op,
                device,
                tensors
            }),
        }),
        Just(Submission::Join),
        Just(Submission::Shutdown(Leaving::Asked)),
        Just(Submission::Shutdown(Leaving::Ended)),
        Just(Submission::Shutdown(Leaving::Failed)),
        Just(Submission::ShutdownAck),
    ]
}

fn submission() -> impl Strategy<Value = Submission> {
    let ascending = || prop::collection::btree_set(0..9u32, 0..4);
    let ranks = |ranks: std::collections::BTreeSet<u32>| ranks.into_iter().map(Rank).collect();
    prop_oneof![
        3 => plain_submission(),
        1 => (ascending(), ascending(), plain_submission()).prop_map(move |(some, tops, item)| {
            Submission::Of {
                ranks: ranks(some),
                subtrees: ranks(tops),
                item: Box::new(item),
            }
        }),
        1 => lost().prop_map(Submission::Lost),
    ]
}

fn to_coordinator() -> impl Strategy<Value = ToCoordinator> {
    let items = prop::collection::vec(submission(), 0..6);
    (any::<u64>(), any::<u64>(), items).prop_map(|(generation, seen, items)| ToCoordinator {
        generation: Generation(generation),
        seen,
        items,
    })
}

fn item() -> impl Strategy<Value = Item> {
    prop_oneof![
        run().prop_map(Item::Slots),
        (slot(), dims()).prop_map(|(slot, first_dims)| Item::GatherSlot { slot, first_dims }),
        (
            name(),
            tensors(),
            prop::option::of(any::<u64>().prop_map(Slot)),
            dims()
        )
            .prop_map(|(name, tensors, slot, first_dims)| Item::New {
                name,
                tensors,
                slot,
                first_dims
            }),
    ]
}

fn text() -> impl Strategy<Value = String> {
    "\\PC{0,30}"
}

fn lost() -> impl Strategy<Value = PeerLost> {
    let cause = prop_oneof![
        text().prop_map(LossCause::Ended),
        text().prop_map(LossCause::Connection),
        text().prop_map(LossCause::CannotGoOn),
        text().prop_map(LossCause::Stuck),
        text().prop_map(LossCause::BrokeProtocol),
        text().prop_map(LossCause::Unreadable),
        Just(LossCause::Left),
        any::<u64>().prop_map(|seconds| LossCause::Silent { seconds }),
        (rank(), text(), text()).prop_map(|(from, from_host, what)| LossCause::Altered {
            from,
            from_host,
            what
        }),
    ];
    (rank(), text(), cause).prop_map(|(rank, host, cause)| PeerLost { rank, host, cause })
}

fn pair<S: Strategy + Clone>(one: S) -> impl Strategy<Value = [S::Value; 2]> {
    (one.clone(), one).prop_map(|(a, b)| [a, b])
}

fn difference() -> impl Strategy<Value = Difference> {
    let dtypes = select(DType::ALL.to_vec());
    let reductions = select(vec![ReduceOp::Average, ReduceOp::Min, ReduceOp::Product]);
    let ops = || pair(op().boxed());
    let scale = (any::<u64>(), any::<u64>()).prop_map(|(pre, post)| Scale {
        pre: f64::from_bits(pre),
        post: f64::from_bits(post),
    });
    let shapes = pair(prop::collection::vec(any::<u64>(), 0..4).boxed());
    prop_oneof![
        pair(dtypes).prop_map(Difference::DataTypes),
        ops().prop_map(Difference::Operations),
        pair(any::<u64>()).prop_map(Difference::GroupSizes),
        (op(), shapes).prop_map(|(op, shapes)| Difference::Shapes {
            op,
            shapes: shapes.map(Shape::from)
        }),
        (op(), pair(any::<u64>())).prop_map(|(op, counts)| Difference::Dimensions { op, counts }),
        (op(), any::<u64>(), pair(any::<u64>()))
            .prop_map(|(op, index, sizes)| Difference::Dimension { op, index, sizes }),
        pair(scale.boxed()).prop_map(Difference::Factors),
        pair(reductions).prop_map(Difference::Reductions),
        pair(rank().boxed()).prop_map(Difference::Roots),
        pair(ascending_ranks().boxed()).prop_map(Difference::NewSets),
        pair(any::<u32>().prop_map(ProcessSetId).boxed()).prop_map(Difference::RemovedSets),
        (op(), pair(device().boxed()))
            .prop_map(|(op, devices)| Difference::Devices { op, devices }),
    ]
}

fn refusal() -> impl Strategy<Value = Refusal> {
    let why = prop_oneof![
        op().prop_map(|op| Impossible::Joined { op }),
        op().prop_map(|op| Impossible::NoRows { op }),
        (any::<u64>(), any::<u64>())
            .prop_map(|(tensors, members)| Impossible::TooManyParts { tensors, members }),
        Just(Impossible::TooLarge),
    ];
    prop_oneof![
        (text(), pair(rank().boxed()), difference()).prop_map(|(tensor, ranks, difference)| {
            Refusal::Mismatch(Box::new(Mismatch {
                tensor,
                ranks,
                difference,
            }))
        }),
        (text(), why).prop_map(|(tensor, why)| Refusal::Impossible { tensor, why }),
        ascending_ranks().prop_map(|ranks| Refusal::DuplicateSet { ranks }),
        Just(Refusal::TooManySets),
    ]
}

fn stop_reason() -> impl Strategy<Value = StopReason> {
    let leaving = vec![Leaving::Asked, Leaving::Ended, Leaving::Failed];
    prop_oneof![
        select(leaving).prop_map(StopReason::Left),
        text().prop_map(|tensor| StopReason::Stalled { tensor }),
        text().prop_map(|report| StopReason::Deadlock { report }),
        text().prop_map(|report| StopReason::ReplicasDiffer { report }),
    ]
}

fn response() -> impl Strategy<Value = Response> {
    let set = || any::<u64>().prop_map(SetKey);
    let absent = || ascending_ranks().prop_map(Arc::<[Rank]>::from);
    let items = prop::collection::vec(item(), 0..5);
    prop_oneof![
        (any::<u64>(), set(), op(), device(), absent(), items).prop_map(
            |(seq, set, op, device, absent, items)| Response::Execute {
                seq: Seq(seq),
                set,
                op,
                device,
                absent,
                items
            }
        ),
        (set(), name(), absent(), refusal()).prop_map(|(set, name, absent, error)| {
            Response::Fail {
                set,
                name,
                absent,
                error,
            }
        }),
        rank().prop_map(|last| Response::Joined { last }),
        (name(), set(), any::<u32>(), absent()).prop_map(|(name, key, id, ranks)| {
            Response::SetAdded {
                name,
                key,
                id: ProcessSetId(id),
                ranks,
            }
        }),
        (name(), prop::option::of(set()))
            .prop_map(|(name, key)| Response::SetRemoved { name, key }),
        (rank(), stop_reason()).prop_map(|(by, why)| Response::Shutdown { by, why }),
        Just(Response::Stopped),
        (any::<u64>(), prop::collection::vec(any::<u64>(), 0..5)).prop_map(|(seq, values)| {
            Response::Tuned {
                seq: Seq(seq),
                values: values.into(),
            }
        }),
        lost().prop_map(Response::Lost),
    ]
}

fn to_worker() -> impl Strategy<Value = ToWorker> {
    let responses = prop::collection::vec(response().prop_map(Arc::new), 0..5);
    let evicted = prop::collection::vec(run(), 0..4);
    (any::<u64>(), any::<u64>(), responses, evicted).prop_map(
        |(generation, mark, responses, evicted)| ToWorker {
            generation: Generation(generation),
            mark,
            responses,
            evicted,
        },
    )
}

fn bytes_up(message: &ToCoordinator) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

fn bytes_down(message: &ToWorker) -> Vec<u8> {
    let mut bytes = Vec::new();
    message.encode(&mut bytes);
    bytes
}

/// Feeds bytes to both sides as an attacker inside the job would.
fn feed(bytes: &[u8]) {
    const SIZE: u32 = 3;
    if let Ok(message) = ToCoordinator::decode(bytes) {
        let generation = message.generation;
        let mut coordinator = Coordinator::new(CoordinatorConfig::new(SIZE, generation));
        coordinator.handle_message(Time(0), Rank(1), &message);
        coordinator.handle_message(Time(1), Rank(2), &message);
        coordinator.handle_message(Time(2), Rank(0), &message);
        coordinator.handle_timeout(Time(u64::MAX));
        while coordinator.poll_action().is_some() {}
    }
    // A tree of five in which rank 1 has 2 and 3 below it.
    let tree = Tree::new(&[0, 1, 1, 1, 2], 2);
    let aggregator = |generation| {
        let config = AggregatorConfig {
            rank: Rank(1),
            generation,
            hold_ns: 1,
        };
        Aggregator::new(config, &tree).expect("rank 1 aggregates")
    };
    if let Ok(message) = ToCoordinator::decode(bytes) {
        let generation = message.generation;
        let config = CoordinatorConfig::new(tree.size(), generation);
        let mut coordinator = Coordinator::with_tree(config, &tree);
        coordinator.handle_message(Time(0), Rank(1), &message);
        coordinator.handle_message(Time(1), Rank(0), &message);
        while coordinator.poll_action().is_some() {}
        let mut aggregator = aggregator(generation);
        aggregator.handle_up(Time(0), Rank(2), &message);
        aggregator.handle_up(Time(0), Rank(1), &message);
        aggregator.handle_timeout(Time(9));
        while aggregator.poll_action().is_some() {}
    }
    if let Ok(message) = ToWorker::decode(bytes) {
        let mut aggregator = aggregator(message.generation);
        aggregator.handle_down(Time(0), &message);
        aggregator.handle_down(Time(0), &message);
        while aggregator.poll_action().is_some() {}
    }
    if let Ok(message) = ToWorker::decode(bytes) {
        let generation = message.generation;
        let mut worker = Worker::new(WorkerConfig {
            rank: Rank(1),
            size: SIZE,
            generation,
        });
        worker.handle_message(&message);
        worker.handle_message(&message);
        while worker.poll_action().is_some() {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_a_worker_says_survives_the_wire(message in to_coordinator()) {
        prop_assert_eq!(ToCoordinator::decode(&bytes_up(&message)), Ok(message));
    }

    #[test]
    fn what_the_coordinator_says_survives_the_wire(message in to_worker()) {
        prop_assert_eq!(ToWorker::decode(&bytes_down(&message)), Ok(message));
    }

    #[test]
    fn a_cut_or_padded_message_is_refused(message in to_worker(), cut in any::<Index>()) {
        let mut bytes = bytes_down(&message);
        prop_assert!(ToWorker::decode(&bytes[..cut.index(bytes.len())]).is_err());
        bytes.push(0);
        prop_assert!(ToWorker::decode(&bytes).is_err());
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        feed(&bytes);
    }

    #[test]
    fn honest_but_impossible_messages_never_panic(up in to_coordinator(), down in to_worker()) {
        feed(&bytes_up(&up));
        feed(&bytes_down(&down));
    }

    #[test]
    fn mutated_messages_never_panic(
        up in to_coordinator(),
        down in to_worker(),
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..6),
    ) {
        for mut bytes in [bytes_up(&up), bytes_down(&down)] {
            for (at, value) in &changes {
                let at = at.index(bytes.len());
                bytes[at] = *value;
            }
            feed(&bytes);
        }
    }
}

/// Submits requests that start out valid and whose messages are then changed on the way.
#[test]
fn no_changed_byte_of_a_real_conversation_panics() {
    let generation = Generation(1);
    let requests = |rank: u32| {
        let tensor = TensorMeta::new(DType::F32, [2, u64::from(rank)]);
        [
            Op::Allgather,
            Op::Barrier,
            Op::AddProcessSet {
                ranks: vec![Rank(0)],
            },
            Op::Join,
        ]
        .map(|op| {
            let tensors = if op == Op::Allgather {
                vec![tensor.clone()]
            } else {
                vec![]
            };
            let name = format!("{op:?}");
            Request {
                set: ProcessSetId::GLOBAL,
                name,
                op,
                device: Device::Cpu,
                tensors,
            }
        })
    };
    let mut workers: Vec<Worker> = (0..2)
        .map(|r| {
            Worker::new(WorkerConfig {
                rank: Rank(r),
                size: 2,
                generation,
            })
        })
        .collect();
    let mut messages = Vec::new();
    for (rank, worker) in workers.iter_mut().enumerate() {
        for (id, request) in requests(rank as u32).into_iter().enumerate() {
            worker.submit(EntryId(id as u64), &request).unwrap();
        }
        while let Some(WorkerAction::Send(message)) = worker.poll_action() {
            messages.push((Rank(rank as u32), bytes_up(&message)));
        }
    }
    let mut accused = 0;
    for changed in 0..messages.len() {
        for at in 0..messages[changed].1.len() {
            for value in 0..=255 {
                let mut coordinator = Coordinator::new(CoordinatorConfig::new(2, generation));
                for (number, (rank, bytes)) in messages.iter().enumerate() {
                    let mut bytes = bytes.clone();
                    if number == changed {
                        bytes[at] = value;
                    }
                    if let Ok(message) = ToCoordinator::decode(&bytes) {
                        coordinator.handle_message(Time(0), *rank, &message);
                    }
                }
                while let Some(action) = coordinator.poll_action() {
                    match action {
                        CoordinatorAction::Send(_, message) => {
                            assert!(bytes_down(&message).len() <= MESSAGE_BYTES_MAX);
                        }
                        CoordinatorAction::Abort(lost) => {
                            assert_eq!(lost.rank, Rank(changed as u32), "blamed the honest one");
                            accused += 1;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    assert!(
        accused > 100,
        "only {accused} changes were noticed as impossible"
    );
}
