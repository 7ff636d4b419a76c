//! Endings of the engine thread that other threads can hardly bring about at the right moment.

use std::sync::mpsc;
use std::thread;

use horovod_protocol::{
    DType, Device, EntryId, ExecItem, Execution, Item, LossCause, Op, ProcessSetId, Rank, ReduceOp,
    Request, Response, Scale, Seq, SetKey, StopReason, TensorMeta, ToWorker,
};
use horovod_transport::ControlEvent;
use horovod_transport::testing::Cluster;

use super::advance::{ExecutionPath, ExecutionState, StagingIn};
use super::*;
use crate::engine::Handle;
use crate::engine::accelerator::Accelerators;
use crate::engine::backend::{Failure, StageIn};
use crate::engine::handles::Delivery;
use crate::engine::{FinalNotification, Waited};
use crate::tensor::{Output, Tensor};

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);

fn driver(mesh: Mesh) -> Driver {
    let shared = Arc::new(EngineState::new(
        &Config::solo(),
        &mesh,
        Accelerators::new(Vec::new()).unwrap(),
    ));
    Driver::new(&Config::solo(), mesh, Vec::new(), shared)
}

fn meta() -> TensorMeta {
    TensorMeta::new(DType::F32, [4])
}

/// A sum over some ranks in which this one takes part with `entry`, or with nothing.
fn sum_over(ranks: &[u32], entry: Option<EntryId>) -> Execution {
    Execution {
        seq: Seq(1),
        set: ProcessSetId::GLOBAL,
        members: ranks.iter().copied().map(Rank).collect(),
        op: Op::Allreduce {
            op: ReduceOp::Sum,
            scale: Scale::NONE,
        },
        device: Device::Cpu,
        contributors: 1,
        tag: None,
        items: vec![ExecItem {
            entry,
            name: "x".into(),
            tensors: [meta()].into(),
            reordered: false,
            first_dims: Vec::new(),
        }],
    }
}

/// Execute on a thread of its own; panics when that hangs.
fn execute(mut driver: Driver, execution: Execution) -> Driver {
    let (done, ended) = mpsc::channel();
    thread::spawn(move || {
        driver.pump.queue.push(execution);
        let task = driver.next_task().expect("just queued");
        driver.carry_out(task);
        let _ = done.send(driver); // nobody listens any more after a failure
    });
    ended.recv_timeout(LIMIT).expect("the execution hangs")
}

/// All ranks stop, and none has left.
fn stop() -> StopReason {
    StopReason::Deadlock {
        report: String::new(),
    }
}

fn cause(driver: &Driver) -> String {
    let dead = driver.pump.membership.cause();
    dead.map(ToString::to_string).unwrap_or_default()
}

#[test]
fn a_link_that_breaks_after_the_stop_ends_the_last_collective() {
    let mut meshes = Cluster::new(2).shm(false).build();
    drop(meshes.pop());
    let mut driver = driver(meshes.remove(0));
    driver.pump.membership.stop(stop());
    let driver = execute(driver, sum_over(&[0, 1], None));
    assert!(cause(&driver).contains("rank 1"), "{}", cause(&driver));
}

fn remote() -> Failure {
    Failure::Remote("remote process exited or there was a network error".into())
}

/// Copies of a device's tensors into host memory that fail because of another rank.
struct FailingCopies;

impl StageIn for FailingCopies {
    fn poll(&mut self) -> Option<Result<Vec<Option<Entry>>, Failure>> {
        Some(Err(remote()))
    }
}

/// Rank 1 fails, and then rank 2 is lost, whose neighbour is rank 0: how rank 1's generation ends.
fn end_after(fail: impl FnOnce(&mut Driver) + Send + 'static) -> String {
    let mut meshes = Cluster::new(3).shm(false).build();
    let lost = meshes.pop();
    let mut other = driver(meshes.remove(1));
    let mut neighbour = driver(meshes.remove(0));
    let (begins, begun) = mpsc::channel();
    let failed = thread::spawn(move || {
        begins.send(()).expect("the test listens");
        fail(&mut other);
        cause(&other)
    });
    begun.recv_timeout(LIMIT).expect("the thread runs");
    drop(lost);
    while !neighbour.pump.membership.is_over() {
        neighbour.pump.progress();
    }
    failed.join().expect("no panic")
}

#[test]
fn who_fails_because_of_another_waits_until_the_neighbour_of_that_one_has_said_who() {
    let why = end_after(|driver| {
        driver.pump.failure(remote());
    });
    assert!(why.contains("rank 2"), "{why}");
}

#[test]
fn copies_that_fail_because_of_another_wait_for_its_name_too() {
    let why = end_after(|driver| {
        driver.suspended = Some(ExecutionTask {
            execution: sum_over(&[0, 1, 2], None),
            entries: Vec::new(),
            recorded: None,
            measured: None,
            outputs: Vec::new(),
            received: Vec::new(),
            state: ExecutionState::StageIn(StagingIn {
                path: ExecutionPath::OnHost,
                copies: Box::new(FailingCopies),
                outcome: None,
            }),
        });
        driver.work();
    });
    assert!(why.contains("rank 2"), "{why}");
}

#[test]
fn a_shutdown_is_not_held_up_for_ever_by_a_collective_with_a_stuck_peer() {
    let mut meshes = Cluster::new(2).build();
    let stuck = meshes.pop();
    let mut driver = driver(meshes.remove(0));
    driver.pump.shared.shutdown.request();
    driver.pump.membership.expire_shutdown();
    let mut driver = execute(driver, sum_over(&[0, 1], None));
    assert!(cause(&driver).contains("shutdown"), "{}", cause(&driver));
    assert!(driver.pump.finished());
    drop(stuck);
}

#[test]
fn after_the_end_of_a_generation_no_timer_of_it_keeps_a_rank_awake() {
    let mut meshes = Cluster::new(2).build();
    let peer = meshes.pop();
    let mesh = meshes.remove(0);
    let mut config = Config::solo();
    config.stalls.diagnosis = Some(Duration::from_millis(1));
    let shared = Arc::new(EngineState::new(
        &config,
        &mesh,
        Accelerators::new(Vec::new()).unwrap(),
    ));
    let mut driver = Driver::new(&config, mesh, Vec::new(), shared);
    let is_due = |driver: &Driver| {
        let now = driver.pump.shared.now();
        let at = driver.pump.inspection.deadline(|| now);
        at.expect("rank 0 looks for stalls") <= now
    };
    while !is_due(&driver) {
        thread::yield_now();
    }
    driver.pump.end_generation(&PeerLost {
        rank: Rank(1),
        host: "h".into(),
        cause: LossCause::Ended("gone".into()),
    });
    assert!(driver.pump.sleep_limit() > Duration::from_millis(500));
    assert_eq!(driver.pump.deadline(), None);
    drop(peer);
}

/// Remembers, when it is let go, whether its operation had already been reported as ended.
struct Owner(Arc<EngineState>, Handle, mpsc::Sender<Option<bool>>);

impl Drop for Owner {
    fn drop(&mut self) {
        let _ = self.2.send(self.0.handles.poll(self.1));
    }
}

#[test]
fn an_aborted_operation_is_reported_only_when_its_memory_is_no_longer_used() {
    let mut meshes = Cluster::new(2).build();
    drop(meshes.pop());
    let driver = driver(meshes.remove(0));
    let shared = driver.pump.shared.clone();
    let handle = shared.handles.create(Delivery::ToWaiter(None));
    let (let_go, polled) = mpsc::channel();
    let mut data = Box::new([1.0f32; 4]);
    let p = data.as_mut_ptr().cast::<u8>();
    let tensor = {
        // SAFETY: the memory outlives the operation, and nobody else touches it.
        unsafe { Tensor::new(meta(), p, Output::At(p)) }.kept_by(Arc::new(Owner(
            shared.clone(),
            handle,
            let_go,
        )))
    };
    let id = EntryId(handle.0);
    let entry = Entry {
        tensors: tensor.into(),
        splits: None,
        submitted: None,
        allocator: None,
        _called_back: None,
    };
    shared.lock().insert(id, entry);
    let _driver = execute(driver, sum_over(&[0, 1], Some(id)));
    assert_eq!(polled.recv_timeout(LIMIT), Ok(Some(false)));
    assert_eq!(shared.handles.poll(handle), Some(true));
}

/// Both come in one look at the control plane: the decision to run an operation, and the news that ends its generation.
#[test]
fn what_was_decided_just_before_the_end_of_a_generation_is_not_run_any_more() {
    let mut driver = driver(Cluster::new(2).build().remove(1));
    let shared = driver.pump.shared.clone();
    let handle = shared.handles.create(Delivery::ToWaiter(None));
    let id = EntryId(handle.0);
    let mut data = [1.0f32; 4];
    let p = data.as_mut_ptr().cast::<u8>();
    // SAFETY: the memory outlives the operation, and nobody else touches it.
    let tensor = unsafe { Tensor::new(meta(), p, Output::At(p)) };
    let entry = Entry {
        tensors: tensor.into(),
        splits: None,
        submitted: None,
        allocator: None,
        _called_back: None,
    };
    let op = Op::Allreduce {
        op: ReduceOp::Sum,
        scale: Scale::NONE,
    };
    let request = Request {
        set: ProcessSetId::GLOBAL,
        name: "x".into(),
        op: op.clone(),
        device: Device::Cpu,
        tensors: vec![meta()],
    };
    {
        let mut state = shared.lock();
        state.insert(id, entry);
        state.worker.submit(id, &request).expect("is accepted");
        state.worker.handle_message(&ToWorker {
            generation: driver.pump.links.topology().generation,
            mark: 0,
            responses: vec![Arc::new(Response::Execute {
                seq: Seq(1),
                set: SetKey::GLOBAL,
                op,
                device: Device::Cpu,
                absent: [].into(),
                items: vec![Item::New {
                    name: "x".into(),
                    tensors: [meta()].into(),
                    slot: None,
                    first_dims: Vec::new(),
                }],
            })],
            evicted: Vec::new(),
        });
        assert_eq!(state.worker.pending(), 0, "it is decided");
    }
    driver.pump.handle_control(ControlEvent::Notice(PeerLost {
        rank: Rank(0),
        host: "h".into(),
        cause: LossCause::Ended("died".into()),
    }));
    assert!(!driver.has_task());
    let end = shared.handles.lock().take(handle);
    assert!(
        matches!(end, Some(Waited::Ended { result: Err(_), .. })),
        "{end:?}"
    );
}

#[test]
fn after_the_stop_only_ranks_with_agreed_work_are_missed() {
    let mut driver = driver(Cluster::new(3).build().remove(0));
    let pump = &mut driver.pump;
    pump.membership.stop(stop());
    pump.queue.push(sum_over(&[0, 2], None));
    pump.handle_control(ControlEvent::Left { rank: Rank(1) });
    assert!(pump.membership.suspected().is_none());
    pump.handle_control(ControlEvent::Left { rank: Rank(2) });
    assert!(pump.membership.suspected().is_some());
    pump.queue.clear();
    pump.settle_lost_peer();
    assert!(pump.membership.suspected().is_none() && !pump.membership.is_over());
}

#[test]
fn what_was_agreed_before_the_stop_is_carried_out_before_the_engine_ends() {
    let mut driver = driver(Mesh::solo().expect("a mesh of one"));
    let pump = &mut driver.pump;
    pump.membership.stop(stop());
    pump.shared.shutdown.request();
    // It waits for memory, say.
    pump.queue.runs([Rank(0)].into());
    assert!(!pump.finished());
    pump.queue.ended();
    pump.queue.push(sum_over(&[0], None));
    assert!(!pump.finished());
    pump.queue.clear();
    assert!(pump.finished());
}

#[test]
fn a_death_is_blamed_before_the_goodbye_that_it_caused() {
    let mut driver = driver(Cluster::new(3).build().remove(0));
    let pump = &mut driver.pump;
    pump.handle_control(ControlEvent::Left { rank: Rank(1) });
    pump.handle_control(ControlEvent::Lost(PeerLost {
        rank: Rank(2),
        host: String::new(),
        cause: LossCause::Ended("died".into()),
    }));
    pump.handle_control(ControlEvent::Left { rank: Rank(0) });
    let suspected = pump.membership.suspected();
    assert_eq!(suspected.map(|(lost, _)| lost.rank), Some(Rank(2)));
}

#[test]
fn whatever_ends_the_thread_nothing_waits_for_it_afterwards() {
    let driver = driver(Mesh::solo().expect("a mesh of one"));
    let shared = driver.pump.shared.clone();
    let handle = shared.handles.create(Delivery::ToWaiter(None));
    drop(FinalNotification(shared.clone()));
    assert_eq!(shared.handles.poll(handle), Some(true));
}
