//! The operations of one set of ranks, each a call that returns with its result.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use horovod_engine::{self as engine, Engine, Op, ProcessSetId, Rank, in_callback};

use crate::element::{Element, Reduce};
use crate::error::{Error, Result};
use crate::memory;
use crate::operation::{self, Call, Shape};
use crate::reduction::{ReduceOp, Reduction};
use crate::scope::{self, Scope};

/// Some ranks of the job, and the operations among them. [`Horovod`](crate::Horovod) dereferences to the communicator
/// of all ranks; [`ProcessSet::communicator`](crate::ProcessSet::communicator) gives that of a process set.
///
/// All members must make the same calls. A call pairs with those of the other members by its kind and its name:
/// [`named`](Self::named) gives a view whose calls have one. Calls without a name are numbered per kind, so all members
/// must make them in the same order; calls with a name may come in any order, also from several threads.
///
/// The methods that return a result wait for it. [`scope`](Self::scope) begins several operations on borrowed slices
/// before it waits; the methods that end in `_async` take a vector and return a future.
///
/// # Errors
/// Every operation can end with
/// - [`Error::Disagreement`]: the ranks passed other lengths, types, operations or roots. All get it, the job goes on;
/// - [`Error::NameInUse`]: an operation of this name is under way on this rank;
/// - [`Error::Lost`], [`Error::Left`], [`Error::Stalled`]: the job is over because of the rank that is named;
/// - [`Error::Closed`]: the guard was dropped;
/// - [`Error::InCallback`]: the call was made in a waker.
#[derive(Clone)]
pub struct Communicator {
    pub(crate) engine: Arc<Engine>,
    set: ProcessSetId,
    /// Ranks of the job, ascending.
    members: Arc<[usize]>,
    /// The place of this process among them.
    rank: usize,
    name: Option<Arc<str>>,
    /// Optimizers that this rank has made with this communicator and its clones, see `framework::optimizer_line`.
    pub(crate) optimizers: Arc<AtomicU64>,
}

/// The result of [`Communicator::alltoall`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Received<T> {
    /// The rows, those of rank 0 first.
    pub values: Vec<T>,
    /// How many rows came from each rank.
    pub rows: Vec<usize>,
}

impl std::fmt::Debug for Communicator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Communicator")
            .field("rank", &self.rank)
            .field("members", &self.members)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Communicator {
    /// The communicator of all ranks.
    pub(crate) fn world(engine: Arc<Engine>) -> Self {
        let topology = engine.topology();
        let (rank, size) = (topology.rank.index(), topology.size as usize);
        Self {
            engine,
            set: ProcessSetId::GLOBAL,
            members: (0..size).collect(),
            rank,
            name: None,
            optimizers: Arc::default(),
        }
    }

    /// The communicator of these ranks of the job; `None` if this process is none of them.
    pub(crate) fn of(
        engine: &Arc<Engine>,
        set: ProcessSetId,
        members: &Arc<[usize]>,
    ) -> Option<Self> {
        let own = engine.topology().rank.index();
        let rank = members.binary_search(&own).ok()?;
        Some(Self {
            engine: engine.clone(),
            set,
            members: members.clone(),
            rank,
            name: None,
            optimizers: Arc::default(),
        })
    }

    /// The place of this process among the members, from 0.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of members.
    pub fn size(&self) -> usize {
        self.members.len()
    }

    /// The members as ranks of the job, ascending.
    pub fn members(&self) -> &[usize] {
        &self.members
    }

    /// A view whose operations have this name. A name that is under way on this rank cannot be used again until its
    /// operation has ended; operations of different kinds may share one.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::Sum;
    ///
    /// let hvd = horovod::init()?;
    /// let mut weights = [1.0f32, 2.0];
    /// hvd.named("weights").allreduce_in_place(&mut weights, Sum)?;
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn named(&self, name: &str) -> Self {
        Self {
            name: Some(name.into()),
            ..self.clone()
        }
    }

    /// Reduces the slices of all members element by element into a new vector, which is the same on every member.
    ///
    /// All members pass slices of the same length and type. `op` is a [`ReduceOp`], or a [`Reduction`] with factors.
    ///
    /// # Errors
    /// Those of [`Communicator`]; [`Error::Invalid`] if the type has no such reduction, or for factors that are not finite.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::Sum;
    ///
    /// let hvd = horovod::init()?;
    /// let ranks = hvd.allreduce(&[1u64], Sum)?;
    /// assert_eq!(ranks, [hvd.size() as u64]);
    /// # Ok(()) }
    /// ```
    pub fn allreduce<T: Reduce>(&self, values: &[T], op: impl Into<Reduction>) -> Result<Vec<T>> {
        let mut values = values.to_vec();
        self.allreduce_in_place(&mut values, op)?;
        Ok(values)
    }

    /// As [`allreduce`](Self::allreduce), into the slice itself. After an error its contents are unspecified values.
    ///
    /// # Errors
    /// Those of [`allreduce`](Self::allreduce).
    pub fn allreduce_in_place<T: Reduce>(
        &self,
        values: &mut [T],
        op: impl Into<Reduction>,
    ) -> Result<()> {
        let op = operation::allreduce(&op.into())?;
        let call = self.call("allreduce", op, Shape::Flat);
        self.may_wait()?;
        memory::run_in_place(&self.engine, &call, values)
    }

    /// As [`allreduce_in_place`](Self::allreduce_in_place), for several slices as one operation: either all of them are
    /// reduced or none. Their lengths may differ from each other, but not between the members. A group of no slices
    /// is no operation.
    ///
    /// # Errors
    /// Those of [`allreduce`](Self::allreduce).
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::Average;
    ///
    /// let hvd = horovod::init()?;
    /// let (mut weights, mut bias) = (vec![1.0f32; 8], [2.0f32]);
    /// hvd.grouped_allreduce_in_place(&mut [&mut weights, &mut bias], Average)?;
    /// assert_eq!(bias, [2.0]);
    /// # Ok(()) }
    /// ```
    pub fn grouped_allreduce_in_place<T: Reduce>(
        &self,
        values: &mut [&mut [T]],
        op: impl Into<Reduction>,
    ) -> Result<()> {
        if values.is_empty() {
            return Ok(());
        }
        let op = operation::allreduce(&op.into())?;
        let call = self.call("grouped_allreduce", op, Shape::Flat);
        self.may_wait()?;
        memory::run_group_in_place(&self.engine, &call, values)
    }

    /// As [`grouped_allreduce_in_place`](Self::grouped_allreduce_in_place), into new vectors.
    ///
    /// # Errors
    /// Those of [`allreduce`](Self::allreduce).
    pub fn grouped_allreduce<T: Reduce>(
        &self,
        values: &[&[T]],
        op: impl Into<Reduction>,
    ) -> Result<Vec<Vec<T>>> {
        let mut values: Vec<Vec<T>> = values.iter().map(|values| values.to_vec()).collect();
        let mut slices: Vec<&mut [T]> = values.iter_mut().map(Vec::as_mut_slice).collect();
        self.grouped_allreduce_in_place(&mut slices, op)?;
        Ok(values)
    }

    /// Concatenates the rows of all members, those of rank 0 first. Every member gets all of them.
    ///
    /// A row has `row` elements, on every member the same number; a member may pass any number of rows, also none.
    ///
    /// # Errors
    /// Those of [`Communicator`]; [`Error::Invalid`] if the slice is no whole number of rows.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// let hvd = horovod::init()?;
    /// let mine = vec![hvd.rank() as u32; 2 * hvd.rank()]; // as many rows of two as the rank says
    /// let all = hvd.allgather(&mine, 2)?;
    /// assert_eq!(all.len(), hvd.size() * (hvd.size() - 1));
    /// # Ok(()) }
    /// ```
    pub fn allgather<T: Element>(&self, values: &[T], row: usize) -> Result<Vec<T>> {
        let call = self.call("allgather", Op::Allgather, Shape::rows(row, values.len())?);
        self.may_wait()?;
        let result = memory::run_allocating(&self.engine, &call, values)?;
        Ok(memory::first_output(result))
    }

    /// Copies the slice of the member `root` into those of all others.
    ///
    /// All members pass slices of the same length. After an error the contents are unspecified values.
    ///
    /// # Errors
    /// Those of [`Communicator`]; [`Error::Invalid`] if there is no such member.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// let hvd = horovod::init()?;
    /// let mut seed = [if hvd.rank() == 0 { 42u64 } else { 0 }];
    /// hvd.broadcast_in_place(&mut seed, 0)?;
    /// assert_eq!(seed, [42]);
    /// # Ok(()) }
    /// ```
    pub fn broadcast_in_place<T: Element>(&self, values: &mut [T], root: usize) -> Result<()> {
        let call = self.call("broadcast", self.broadcast_from(root)?, Shape::Flat);
        self.may_wait()?;
        memory::run_in_place(&self.engine, &call, values)
    }

    /// As [`broadcast_in_place`](Self::broadcast_in_place), into a new vector; of the others only the length counts.
    ///
    /// # Errors
    /// Those of [`broadcast_in_place`](Self::broadcast_in_place).
    pub fn broadcast<T: Element>(&self, values: &[T], root: usize) -> Result<Vec<T>> {
        let mut values = values.to_vec();
        self.broadcast_in_place(&mut values, root)?;
        Ok(values)
    }

    /// Sends rows to every member and receives rows from every member.
    ///
    /// `rows` says how many rows of `row` elements each member gets, from the first row on; together they are all rows
    /// of the slice. With `None` each member gets the same number.
    ///
    /// # Errors
    /// Those of [`Communicator`]; [`Error::Invalid`] if the rows do not add up.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// let hvd = horovod::init()?;
    /// let received = hvd.alltoall(&vec![hvd.rank() as i32; hvd.size()], 1, None)?;
    /// assert_eq!(received.values, (0..hvd.size() as i32).collect::<Vec<_>>());
    /// assert_eq!(received.rows, vec![1; hvd.size()]);
    /// # Ok(()) }
    /// ```
    pub fn alltoall<T: Element>(
        &self,
        values: &[T],
        row: usize,
        rows: Option<&[usize]>,
    ) -> Result<Received<T>> {
        let call = self.alltoall_call(values.len(), row, rows)?;
        self.may_wait()?;
        let result = memory::run_allocating(&self.engine, &call, values)?;
        Ok(received(result))
    }

    /// Reduces the slices of all members, and gives each member its share of the rows.
    ///
    /// All members pass slices of the same length, in rows of `row` elements. With `n` rows and `size` members each gets
    /// `n / size` rows, and one more on each of the first `n % size` members. `op` is `Average` or `Sum`.
    ///
    /// # Errors
    /// Those of [`allreduce`](Self::allreduce); [`Error::Invalid`] for another `op`, or if the slice is no whole number of
    /// rows.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::Sum;
    ///
    /// let hvd = horovod::init()?;
    /// let share = hvd.reduce_scatter(&vec![1.0f64; hvd.size()], 1, Sum)?;
    /// assert_eq!(share, [hvd.size() as f64]);
    /// # Ok(()) }
    /// ```
    pub fn reduce_scatter<T: Reduce>(
        &self,
        values: &[T],
        row: usize,
        op: impl Into<Reduction>,
    ) -> Result<Vec<T>> {
        let call = self.reduce_scatter_call(values.len(), row, &op.into())?;
        self.may_wait()?;
        let result = memory::run_allocating(&self.engine, &call, values)?;
        Ok(memory::first_output(result))
    }

    /// Returns when all members have called it.
    ///
    /// # Errors
    /// Those of [`Communicator`].
    pub fn barrier(&self) -> Result<()> {
        self.may_wait()?;
        let ended = self.engine.barrier::<engine::Error>(self.set, || Ok(()));
        ended.map_err(|error| Error::on(&self.engine, error))
    }

    /// Begins operations on borrowed slices, and returns when all of them have ended.
    ///
    /// The operations run while the closure goes on. Their slices hold the results only after this has returned. The
    /// result is that of the closure, or the first error of an operation, in the order of the calls.
    ///
    /// If the closure panics after an operation has begun, this process leaves the job as failed, so that nobody waits
    /// for it; then the panic goes on.
    ///
    /// # Errors
    /// Those of the operations, of which the others have ended as well; [`Error::InCallback`] in a waker.
    ///
    /// ```
    /// # fn main() -> horovod::Result<()> {
    /// use horovod::ReduceOp::{Average, Max};
    ///
    /// let hvd = horovod::init()?;
    /// let (mut gradient, mut norm) = (vec![0.5f32; 100], [3.0f64]);
    /// hvd.scope(|s| {
    ///     s.named("gradient").allreduce_in_place(&mut gradient, Average);
    ///     s.named("norm").allreduce_in_place(&mut norm, Max);
    ///     // computes while they run
    /// })?;
    /// assert_eq!(norm, [3.0]);
    /// # Ok(()) }
    /// ```
    pub fn scope<'env, R>(
        &'env self,
        body: impl for<'scope> FnOnce(&Scope<'scope, 'env>) -> R,
    ) -> Result<R> {
        self.may_wait()?;
        scope::run(self, body)
    }

    /// An error where waiting would stop all operations of this process.
    pub(crate) fn may_wait(&self) -> Result<()> {
        if in_callback() {
            return Err(Error::InCallback);
        }
        Ok(())
    }

    pub(crate) fn call(&self, kind: &'static str, op: Op, shape: Shape) -> Call<'_> {
        Call {
            kind,
            name: self.name.as_deref(),
            op,
            set: self.set,
            shape,
            splits: None,
        }
    }

    pub(crate) fn broadcast_from(&self, root: usize) -> Result<Op> {
        let Some(member) = self.members.get(root) else {
            return Err(Error::invalid(format!(
                "a broadcast from rank {root} was asked for, among {} ranks; pass a rank below that number",
                self.size()
            )));
        };
        let root = Rank(u32::try_from(*member).unwrap_or(u32::MAX));
        Ok(Op::Broadcast { root })
    }

    pub(crate) fn alltoall_call(
        &self,
        len: usize,
        row: usize,
        rows: Option<&[usize]>,
    ) -> Result<Call<'_>> {
        let shape = Shape::rows(row, len)?;
        let have = len / row;
        let mut call = self.call("alltoall", Op::Alltoall, shape);
        let Some(rows) = rows else {
            if !have.is_multiple_of(self.size()) {
                return Err(Error::invalid(format!(
                    "{have} rows cannot be sent in equal numbers to {} ranks; say how many each gets",
                    self.size()
                )));
            }
            return Ok(call);
        };
        let total = rows.iter().try_fold(0usize, |sum, n| sum.checked_add(*n));
        if rows.len() != self.size() || total != Some(have) {
            return Err(Error::invalid(format!(
                "the numbers of rows for each rank are {rows:?}; expected are {} numbers whose sum is {have}, the rows \
                 of the slice",
                self.size()
            )));
        }
        let splits = rows.iter().map(|n| i64::try_from(*n).unwrap_or(i64::MAX));
        call.splits = Some(splits.collect());
        Ok(call)
    }

    pub(crate) fn reduce_scatter_call(
        &self,
        len: usize,
        row: usize,
        reduction: &Reduction,
    ) -> Result<Call<'_>> {
        let op = reduction.op();
        if !matches!(op, ReduceOp::Average | ReduceOp::Sum) {
            return Err(Error::invalid(format!(
                "reduce_scatter was asked for {op:?}; it has Average and Sum"
            )));
        }
        let shape = Shape::rows(row, len)?;
        let op = operation::reduce_scatter(reduction)?;
        Ok(self.call("reducescatter", op, shape))
    }
}

/// The rows of an alltoall.
pub(crate) fn received<T: Element>(mut result: engine::OpResult) -> Received<T> {
    let rows = result.received_splits.take().unwrap_or_default();
    Received {
        values: memory::first_output(result),
        rows: rows.into_iter().map(|n| n as usize).collect(),
    }
}
