//! A kind of device of a program's own, by the public interface alone: the last rank to launch computes for all, and a
//! submission must say in which of the device's banks its tensor lies.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, mpsc};

use horovod_engine::accelerator::{
    Aborted, Accelerator, Backend, Execution, Failure, InFlight, Members, Notifier, Placement,
    Results, Route, Start, Started, Surroundings,
};
use horovod_engine::config::Config;
use horovod_engine::{
    Completion, DType, Device, Engine, Error, Op, OpResult, Output, ProcessSetId, Rank, ReduceOp,
    Scale, Submission, Tensor, TensorMeta, Waited,
};
use horovod_transport::testing;

use crate::common::LIMIT;

const TOY: Device = Device::Other(7);
const MAX: Op = Op::Allreduce {
    op: ReduceOp::Max,
    scale: Scale::NONE,
};

/// Addresses of one rank's tensor and its length, and where its results go.
struct Part {
    input: usize,
    output: usize,
    elems: usize,
    end: mpsc::Sender<()>,
    notifier: Notifier,
}

/// The device, which all ranks of this process share.
#[derive(Default)]
struct Fabric(Mutex<BTreeMap<u64, Vec<Part>>>);

impl Fabric {
    fn add(&self, seq: u64, members: usize, part: Part) {
        let mut all = self.0.lock().expect("no panic");
        let parts = all.entry(seq).or_default();
        parts.push(part);
        if parts.len() < members {
            return;
        }
        for i in 0..parts[0].elems {
            let at = |address: usize| {
                std::ptr::with_exposed_provenance_mut::<f32>(address).wrapping_add(i)
            };
            // SAFETY: the engines keep the tensors until the ends, and all tensors have this length.
            let values = parts.iter().map(|part| unsafe { *at(part.input) });
            let most = values.fold(f32::MIN, f32::max);
            // SAFETY: as above.
            (parts.iter()).for_each(|part| unsafe { *at(part.output) = most });
        }
        for part in parts.drain(..) {
            let _ = part.end.send(()); // an engine that has given up no longer listens
            part.notifier.notify();
        }
    }
}

struct Toy(Arc<Fabric>);

impl Accelerator for Toy {
    fn kind(&self) -> Device {
        TOY
    }

    fn claim(&self, tensors: &[Tensor]) -> Result<(), Error> {
        let bank = |tensor: &Tensor| tensor.placement()?.downcast_ref::<u32>().copied();
        match tensors.iter().all(|tensor| bank(tensor) == Some(3)) {
            true => Ok(()),
            false => Err(Error::Invalid("the toy has data in bank 3 only".into())),
        }
    }

    fn backend(self: Arc<Self>, surroundings: &Surroundings<'_>) -> Box<dyn Backend> {
        Box::new(ToyBackend {
            fabric: self.0.clone(),
            rank: surroundings.topology.rank,
            notifier: surroundings.notifier.clone(),
        })
    }
}

struct ToyBackend {
    fabric: Arc<Fabric>,
    rank: Rank,
    notifier: Notifier,
}

impl Backend for ToyBackend {
    fn name(&self) -> &'static str {
        "TOY"
    }

    fn offer(&mut self, _: ProcessSetId, _: &[Rank]) -> Vec<u8> {
        vec![self.rank.0 as u8]
    }

    fn settle(&mut self, _: ProcessSetId, members: &Members<'_>) -> Result<(), String> {
        let mut offers = members.ranks.iter().zip(members.offers);
        match offers.all(|(rank, offer)| offer == &[rank.0 as u8]) {
            true => Ok(()),
            false => Err("the offers are mixed up".into()),
        }
    }

    fn route(&self, execution: &Execution) -> Route {
        match execution.op == MAX {
            true => Route::Native,
            false => Route::Refused("the toy only finds a maximum".into()),
        }
    }

    fn start(&mut self, start: Start<'_>) -> Result<Started, Failure> {
        let ([item], [Some(entry)]) = (&start.execution.items[..], start.entries) else {
            return Err(Failure::Local("the toy takes one tensor at a time".into()));
        };
        let ([tensor], Some(id)) = (entry.tensors(), item.entry) else {
            return Err(Failure::Local("the toy takes no groups".into()));
        };
        let Output::At(output) = tensor.output() else {
            return Err(Failure::Local("the toy needs an output".into()));
        };
        let (end, ended) = mpsc::channel();
        let part = Part {
            input: tensor.input().expose_provenance(),
            output: output.expose_provenance(),
            elems: tensor.bytes().unwrap_or(0) / 4,
            end,
            notifier: self.notifier.clone(),
        };
        let (seq, members) = (start.execution.seq.0, start.execution.members.len());
        self.fabric.add(seq, members, part);
        let results = vec![(id, Ok(OpResult::plain(Completion::Done)))];
        Ok(Started::InFlight(Box::new(ToyExecution { ended, results })))
    }
}

struct ToyExecution {
    ended: mpsc::Receiver<()>,
    results: Results,
}

impl InFlight for ToyExecution {
    fn poll(&mut self) -> Option<Result<Results, Failure>> {
        self.ended.try_recv().ok()?;
        Some(Ok(std::mem::take(&mut self.results)))
    }

    fn abort(&mut self, _: &Aborted) {}
}

/// The end of one operation on a tensor in this bank; the tensor is `data`.
fn run(engine: &Engine, name: &str, op: Op, bank: u32, data: &mut [f32]) -> Result<(), Error> {
    let at = data.as_mut_ptr().cast::<u8>();
    let meta = TensorMeta::new(DType::F32, [data.len() as u64]);
    let bank: Placement = Arc::new(bank);
    // SAFETY: the memory outlives the operation, and nobody else touches it; the toy's memory is the host's.
    let tensor = unsafe { Tensor::new(meta, at, Output::At(at)).on(TOY) }.placed(bank);
    let submission = Submission::new("toy", Some(name), op, ProcessSetId::GLOBAL, tensor.into());
    match engine.wait(engine.submit(submission)?, LIMIT) {
        Waited::Ended { result, .. } => result.map(drop),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_program_serves_a_kind_of_device_of_its_own() {
    let fabric = Arc::new(Fabric::default());
    let ranks = testing::cluster(3)
        .into_iter()
        .enumerate()
        .map(|(rank, mesh)| {
            let toy: Arc<dyn Accelerator> = Arc::new(Toy(fabric.clone()));
            std::thread::spawn(move || {
                let engine = Engine::start_with(Config::solo(), mesh, vec![toy]).expect("starts");
                let mut data = vec![rank as f32; 1000];
                let text = |end: Result<(), Error>| end.unwrap_err().to_string();
                run(&engine, "max", MAX, 3, &mut data).expect("is carried out");
                let root = Op::Broadcast { root: Rank(0) };
                let refused = text(run(&engine, "root", root, 3, &mut data));
                let misplaced = text(run(&engine, "bank", MAX, 2, &mut data));
                engine
                    .barrier::<Error>(ProcessSetId::GLOBAL, || Ok(()))
                    .expect("all are here");
                (data, refused, misplaced)
            })
        });
    for rank in Vec::from_iter(ranks) {
        let (data, refused, misplaced) = rank.join().expect("no panic");
        assert_eq!(data, [2.0; 1000]);
        assert_eq!(refused, "the toy only finds a maximum");
        assert_eq!(misplaced, "the toy has data in bank 3 only");
    }
}
