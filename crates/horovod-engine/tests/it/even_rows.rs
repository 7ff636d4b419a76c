//! Outputs of known size in the caller's memory, and waits that are given up for a call: of several engines in one process.

use std::sync::mpsc;
use std::time::Duration;

use horovod_engine::config::Config;
use horovod_engine::{
    DType, Engine, Error, Op, OpResult, Output, ProcessSetId, ReduceOp, Scale, Submission, Tensor,
    TensorMeta, Waited,
};
use horovod_transport::testing;

/// Hard bound of every wait; reached only when something hangs.
const LIMIT: Duration = Duration::from_secs(240);

/// Gather these numbers of rows on as many ranks, into memory for `expected` rows; which output lies there, and its rows.
fn gathered(rows: &[u64], expected: u64) -> Vec<(bool, u64)> {
    let (done, results) = mpsc::channel();
    for (mesh, rows) in testing::cluster(rows.len()).into_iter().zip(rows.to_vec()) {
        let done = done.clone();
        std::thread::spawn(move || {
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let input = vec![1.0f32; rows as usize];
            let mut output = vec![0.0f32; expected as usize];
            let result = gather(&engine, &input, &mut output, rows);
            let Some((memory, shape)) = &result.outputs[0] else {
                panic!("no output");
            };
            let is_there = memory.as_mut_ptr() == output.as_mut_ptr().cast();
            assert_eq!(output.iter().all(|x| *x == 1.0), is_there);
            let outcome = (is_there, shape[0]);
            drop(result);
            engine.shutdown();
            let _ = done.send(outcome); // nobody listens any more after a failure
        });
    }
    rows.iter()
        .map(|_| {
            results
                .recv_timeout(LIMIT)
                .expect("a rank hangs or panicked")
        })
        .collect()
}

/// First waits for no time at all, then is called.
fn gather(engine: &Engine, input: &[f32], output: &mut [f32], rows: u64) -> OpResult {
    let meta = TensorMeta::new(DType::F32, [rows]);
    let at = output.as_mut_ptr().cast();
    let bytes = size_of_val(output);
    // SAFETY: both live until the result is there, and nobody touches them meanwhile.
    let tensor = unsafe { Tensor::new(meta, input.as_ptr().cast(), Output::Even { at, bytes }) };
    let set = ProcessSetId::GLOBAL;
    let submission = Submission::new("test", Some("gather"), Op::Allgather, set, tensor.into());
    let handle = engine.submit(submission).expect("is accepted");
    if let Waited::Ended { result, .. } = engine.wait(handle, Duration::ZERO) {
        return result.expect("succeeds");
    }
    let (end, ended) = mpsc::channel();
    let callback = move |result| {
        let _ = end.send(result); // nobody listens any more after a failure
    };
    engine.call_at_end(handle, Box::new(callback));
    let result = ended.recv_timeout(LIMIT).expect("nobody is called");
    result.expect("succeeds")
}

#[test]
fn even_rows_come_where_they_are_expected() {
    assert_eq!(gathered(&[2, 2, 2], 6), [(true, 6); 3]);
    assert_eq!(gathered(&[3], 3), [(true, 3)]);
}

#[test]
fn uneven_rows_lie_elsewhere_on_all_ranks_also_where_their_sum_is_expected() {
    assert_eq!(gathered(&[1, 2, 3], 6), [(false, 6); 3]);
    assert_eq!(gathered(&[2, 2], 6), [(false, 4); 2]);
}

/// Two ranks scatter three rows of ones; each gives memory for what it gets, and for so many rows more.
fn scattered(more: usize) -> Vec<Result<Vec<f32>, Error>> {
    let ranks = testing::cluster(2).into_iter().map(|mesh| {
        std::thread::spawn(move || {
            let engine = Engine::start(Config::solo(), mesh).expect("starts");
            let set = ProcessSetId::GLOBAL;
            let mine = engine.scattered_rows(set, 3).expect("it is a member");
            let (input, mut output) = (vec![1.0f32; 3], vec![0.0f32; mine as usize + more]);
            let (at, bytes) = (output.as_mut_ptr().cast(), size_of_val(&output[..]));
            let meta = TensorMeta::new(DType::F32, [3]);
            let place = Output::Exactly { at, bytes };
            // SAFETY: both live until the operation has ended, and nobody touches them meanwhile.
            let tensor = unsafe { Tensor::new(meta, input.as_ptr().cast(), place) };
            let op = Op::Reducescatter {
                op: ReduceOp::Sum,
                scale: Scale::NONE,
            };
            let submission = Submission::new("test", Some("scatter"), op, set, tensor.into());
            let handle = engine.submit(submission).expect("is accepted");
            let Waited::Ended { result, .. } = engine.wait(handle, LIMIT) else {
                panic!("it hangs");
            };
            engine.shutdown();
            result.map(|_| output)
        })
    });
    let ranks: Vec<_> = ranks.collect();
    ranks
        .into_iter()
        .map(|rank| rank.join().expect("no panic"))
        .collect()
}

#[test]
fn scattered_rows_come_where_there_is_just_room_for_them() {
    let results: Vec<_> = scattered(0).into_iter().map(Result::unwrap).collect();
    assert_eq!(results, [vec![2.0, 2.0], vec![2.0]]);
    for refused in scattered(1) {
        let error = refused.expect_err("there is more room").to_string();
        assert!(error.contains("bytes for a result that needs"), "{error}");
    }
}
